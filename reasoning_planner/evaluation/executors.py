"""Where the bags of a run are evaluated: here, in processes of this machine, or on a Ray cluster.

Each yields the tasks as they are done, with what they gave or the error that stopped them; the
files a task leaves are the same whoever did it. One bag's failure leaves the others alone.
"""

from __future__ import annotations

import multiprocessing
import queue
import re
import socket
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

from ..errors import DataError, MissingDependencyError, PlannerError
from .bag_job import Task, evaluate_bag, read_result

STEP = 0.005                        # a share smaller than this more is not worth a report
Report = Callable[[str, float], None]       # bag name, share done
Work = Callable[[Task, Callable[[float], None]], dict[str, Any]]


@dataclass(frozen=True)
class Done:
    """A task that is over.

    Attributes:
        result: as `evaluate_bag` gives it; None on a failure.
        error: what stopped it, one line.
        proposal: a `--topics` file, where the topics left a choice.
    """

    task: Task
    result: Optional[dict[str, Any]] = None
    error: str = ""
    proposal: str = ""


def run_here(tasks: Sequence[Task], report: Report) -> Iterator[Done]:
    """One after the other in this process."""
    for task in tasks:
        yield _attempt(task, _stepwise(lambda share, name=task.name: report(name, share)))


def run_in_processes(tasks: Sequence[Task], report: Report, jobs: int) -> Iterator[Done]:
    """`jobs` at a time, each in a process of its own making."""
    context = multiprocessing.get_context("spawn")
    shares = context.Queue()
    with ProcessPoolExecutor(jobs, context, _keep_queue, (shares,)) as pool:
        waiting: dict[Future, Task] = {pool.submit(_work_and_tell, task): task for task in tasks}
        try:
            while waiting:
                over, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                _pass_on(shares, report)
                for future in over:
                    yield _outcome(waiting.pop(future), future)
        finally:
            for future in waiting:
                future.cancel()


def run_on_ray(tasks: Sequence[Task], report: Report, address: Optional[str] = None,
               gpus: float = 0.0) -> Iterator[Done]:
    """On a Ray cluster, one CPU a bag; without an address on this machine's own Ray.

    Bags and results must lie on storage that all machines of the cluster see by the same path, and
    the package must be installed on them.
    Raises:
        MissingDependencyError: Ray is not installed.
        DataError: the cluster does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("ray is not installed: pip install "
                                     "'reasoning_planner[cluster]'") from error
    _connect(ray, address)
    try:
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_attempt)
        waiting = {remote.remote(_absolute(task)): task for task in tasks}
        while waiting:
            over, _ = ray.wait(list(waiting), num_returns=1)
            task = waiting.pop(over[0])
            report(task.name, 1.0)
            yield _seen_here(task, _fetched(ray, over[0], task))
    finally:
        ray.shutdown()


def _connect(ray: Any, address: Optional[str]) -> None:
    """Join the cluster; Ray itself would wait minutes for one that is not there."""
    try:
        if address is not None and (found := re.fullmatch(r"([^:/]+):(\d+)", address)):
            socket.create_connection((found[1], int(found[2])), timeout=10.0).close()
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False,
                 include_dashboard=False if address is None else None)
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"Ray at {address or 'this machine'}: {' '.join(str(error).split())}, "
                        "expected a running cluster") from error


def _fetched(ray: Any, reference: Any, task: Task) -> Done:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:        # the worker died, or lacks the package
        lines = str(error).strip().splitlines()
        return Done(task, error=f"{task.label}: on the cluster: {lines[-1] if lines else error!r}")


def _absolute(task: Task) -> Task:
    return replace(task, bag=task.bag.absolute(), folder=task.folder.absolute(),
                   given=str(task.bag))


def _seen_here(task: Task, done: Done) -> Done:
    """A result that this machine does not see is none."""
    if done.result is not None and read_result(task.folder) is None:
        return Done(task, error=f"{task.folder}: written by the cluster, not seen here, expected "
                    "--out on storage that all machines share")
    return replace(done, task=task)


def _attempt(task: Task, progress: Callable[[float], None] = lambda share: None) -> Done:
    try:
        return Done(task, evaluate_bag(task, progress))
    except PlannerError as error:
        return Done(task, error=str(error), proposal=getattr(error, "proposal", ""))


# Progress of processes: every one tells its share through a queue it is born with

_shares: Any = None


def _keep_queue(shares: Any) -> None:
    global _shares
    _shares = shares


def _work_and_tell(task: Task) -> Done:
    return _attempt(task, _stepwise(lambda share: _shares.put((task.name, share))))


def _stepwise(report: Callable[[float], None]) -> Callable[[float], None]:
    """The same report, called only for shares that are worth it."""
    last = [-1.0]

    def progress(share: float) -> None:
        if share >= last[0] + STEP:
            last[0] = share
            report(share)
    return progress


def _pass_on(shares: Any, report: Report) -> None:
    while True:
        try:
            report(*shares.get_nowait())
        except queue.Empty:
            return


def _outcome(task: Task, future: Future) -> Done:
    try:
        return future.result()
    except Exception as error:      # a worker that died, killed for memory for example
        return Done(task, error=f"{task.label}: its process ended: "
                    f"{' '.join(str(error).split()) or type(error).__name__}")


def folder_of(out: Path, name: str) -> Path:
    """Where the files of one bag of a run lie."""
    return out / "bags" / name
