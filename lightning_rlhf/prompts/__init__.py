"""The verb ``prompts``: the prompts of a run that stand out, their map, and new ones ranked before a run."""
