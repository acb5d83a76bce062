"""``lightning-rlhf supervise``: a small process that starts a training, watches it, and tries again with judgement.

The parent imports neither torch nor Lightning. What runs in the training itself (:mod:`.heartbeat`, :mod:`.ending`)
writes small files in the folder ``supervise`` of the run, which the parent reads.
"""
