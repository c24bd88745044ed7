"""Scheduling and KV block bookkeeping: token ids and block ids, nothing else."""

from quire.sched.pool import BlockPool
from quire.sched.prefix import PrefixIndex, PrefixMatch
from quire.sched.scheduler import Scheduler

__all__ = ["BlockPool", "PrefixIndex", "PrefixMatch", "Scheduler"]
