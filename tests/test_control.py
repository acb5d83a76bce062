"""Verbs and knobs: what callbacks may request, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from lightning_rlhf.control import Control


def test_a_verb_is_pending_until_it_is_taken() -> None:
    control = Control()
    assert control.take("skip_step") is None
    with control.allow("skip_step"):
        control.skip_step("too far")
    assert control.wants("skip_step")
    assert control.take("skip_step") == "too far"
    assert not control.wants("skip_step")
    assert control.counts["skip_step"] == 1


def test_the_first_reason_is_kept_and_every_call_is_recorded() -> None:
    control = Control()
    control.iteration, control.update = 3, 17
    control.stop_epochs("kl")
    control.stop_epochs("clip fraction")
    assert control.take("stop_epochs") == "kl"
    assert [(d.verb, d.reason, d.iteration, d.update) for d in control.decisions] == [
        ("stop_epochs", "kl", 3, 17),
        ("stop_epochs", "clip fraction", 3, 17),
    ]
    assert control.counts["stop_epochs"] == 1, "the epochs were ended once"


def test_a_verb_counts_again_once_it_was_obeyed() -> None:
    control = Control()
    with control.allow("skip_step"):
        for _ in range(2):
            control.skip_step("gradient")
            control.skip_step("kl")
            control.take("skip_step")
    assert control.counts["skip_step"] == 2 and len(control.decisions) == 4


@pytest.mark.parametrize("verb", ["stop_epochs", "skip_step", "rollback", "stop_training"])
def test_a_verb_needs_a_reason(verb: str) -> None:
    control = Control()
    with control.allow("skip_step", "rollback"), pytest.raises(ValueError, match="needs a reason"):
        getattr(control, verb)("")
    assert not control.wants(verb) and not control.counts


@pytest.mark.parametrize("verb", ["skip_step", "rollback"])
def test_a_verb_outside_its_events_is_refused(verb: str) -> None:
    control = Control()
    with control.allow(verb):
        pass
    with pytest.raises(RuntimeError, match=rf"control.{verb} \(too late\) acts only"):
        getattr(control, verb)("too late")
    assert not control.wants(verb) and not control.decisions


def test_a_note_is_recorded_and_changes_nothing() -> None:
    control = Control()
    control.begin_iteration(4)
    control.note("lower_learning_rate", "broken twice")
    assert control.counts["lower_learning_rate"] == 1 and not control.wants("lower_learning_rate")
    assert [(d.verb, d.reason, d.iteration) for d in control.decisions] == [("lower_learning_rate", "broken twice", 4)]


@pytest.mark.parametrize("order", list(itertools.permutations(["minibatch", "actor", "iteration"], 2)))
def test_the_wider_rollback_wins(order: tuple[str, str]) -> None:
    control = Control()
    with control.allow("rollback"):
        for scope in order:
            control.rollback("nan", to=scope)  # type: ignore[arg-type]
        assert control.take_rollback() == ("iteration" if "iteration" in order else "actor")
        assert control.take_rollback() is None
        control.rollback("again", to="minibatch")
    assert control.take_rollback() == "minibatch"


def test_an_unknown_rollback_scope_is_refused() -> None:
    with pytest.raises(ValueError, match="'minibatch', 'iteration', 'actor'"):
        Control().rollback("why", to="epoch")  # type: ignore[arg-type]


def test_a_new_iteration_forgets_verbs_and_multipliers_but_not_the_end_of_training() -> None:
    control = Control()
    control.register("kl_coefficient", 0.1)
    control.scale("kl_coefficient", 3.0, by="guard")
    control.stop_epochs("kl")
    control.stop_training("patience")
    assert control.value("kl_coefficient") == pytest.approx(0.3)
    control.begin_iteration(2)
    assert control.value("kl_coefficient") == 0.1
    assert not control.wants("stop_epochs")
    assert control.training_stopped == "patience"


def test_a_knob_has_one_owner() -> None:
    control = Control()
    control.register("kl_coefficient", 0.1, maximum=0.5)
    control.own("kl_coefficient", "AdaptiveKL")
    control.own("kl_coefficient", "AdaptiveKL")
    with pytest.raises(ValueError, match="already belongs to AdaptiveKL; KLGuard cannot own it"):
        control.own("kl_coefficient", "KLGuard")
    with pytest.raises(ValueError, match="KLGuard may only scale it"):
        control.set("kl_coefficient", 0.2, "KLGuard")
    assert control.set("kl_coefficient", 7.0, "AdaptiveKL") == 0.5, "values are kept inside the bounds"
    with pytest.raises(ValueError, match="nan"):
        control.set("kl_coefficient", float("nan"), "AdaptiveKL")
    with pytest.raises(ValueError, match="finite factor"):
        control.scale("kl_coefficient", float("inf"), by="guard")


def test_multipliers_multiply_and_bounds_hold() -> None:
    control = Control()
    control.register("max_new_tokens", 100, minimum=16, integer=True)
    control.scale("max_new_tokens", 0.75, by="oom")
    control.scale("max_new_tokens", 0.5, by="curriculum")
    assert control.value("max_new_tokens") == 38  # 37.5, rounded to a whole token
    control.scale("max_new_tokens", 0.01, by="oom")
    assert control.value("max_new_tokens") == 16


def test_unknown_knobs_and_values_outside_the_bounds_are_named() -> None:
    control = Control()
    control.register("lr_scale", 1.0)
    with pytest.raises(KeyError, match=r"no knob 'lr'; there are: lr_scale"):
        control.value("lr")
    with pytest.raises(ValueError, match=r"knob beta: -1.0 lies outside"):
        control.register("beta", -1.0)


def test_state_keeps_clocks_counts_and_owned_knobs_only() -> None:
    def fresh(kl: float, scale: float) -> Control:
        control = Control()
        control.register("kl_coefficient", kl)
        control.register("lr_scale", scale)
        control.own("kl_coefficient", "AdaptiveKL")
        return control

    saved = fresh(0.1, 1.0)
    saved.begin_iteration(5)
    saved.update = 40
    saved.set("kl_coefficient", 0.25, "AdaptiveKL")
    with saved.allow("skip_step"):
        saved.skip_step("nan")
    restored = fresh(0.1, 0.5)
    restored.load_state_dict(saved.state_dict())
    assert (restored.iteration, restored.update, restored.counts["skip_step"]) == (5, 40, 1)
    assert restored.value("kl_coefficient") == 0.25
    assert restored.value("lr_scale") == 0.5, "a setting nobody steers follows the new configuration"
