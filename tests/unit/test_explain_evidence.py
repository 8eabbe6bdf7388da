"""`threefold explain` on more than one text: files, folders, dumps, a run's record; what is no failure; JSON."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from logs.cases import PUBLIC
from threefold.commands.explain import explain_command
from threefold.convert.dcp_reader import open_dcp
from threefold.errors import CheckpointError, ConfigError
from threefold.explain import evidence
from threefold.explain.answer import answer, text
from threefold.explain.evidence import JobEvidence, gather
from threefold.explain.explain import (
    Confidence,
    Diagnosis,
    Explanation,
    Status,
    examine,
    explain,
)
from threefold.explain.groups import first_differences
from threefold.explain.log import Log, LogSource
from threefold.explain.sources.dumps import read_dump

LOGS = Path(__file__).parents[1] / "logs"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
PROGRESS = "step 10/100  loss 3.2\nstep 20/100  loss 3.1\n"


def failure(text: str) -> Explanation:
    found = examine(Log.of(text))
    assert found.status is Status.FAILURE and found.explanation is not None
    return found.explanation


# ---- what is no failure


def test_run_that_finished_has_not_failed() -> None:
    found = examine(
        Log.of(f"{OUT_OF_MEMORY}halved the batch\ndone: 20 steps, loss 2.9, in runs/a\n")
    )
    assert found.status is Status.FINISHED
    assert found.telling[0].number == 3


def test_run_that_goes_on_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text(json.dumps({"event": "start", "start": 1}) + "\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0000.log").write_text(PROGRESS)
    with (tmp_path / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown, _ = explain_command([tmp_path])
    assert (
        f"  it is still running: process {os.getpid()} of this host holds its lock\n" in shown
    )
    assert "still running" not in explain_command([tmp_path])[0]


def test_run_of_ours_that_finished_has_not_failed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    begin = "2026-11-22 15:53:21,335 INFO threefold: "
    lines = (
        "process 4242",
        "done: 5 steps, loss 4.6327, in runs/a",
        "export: threefold export runs/a --to DIR",
    )
    (tmp_path / "logs" / "rank-0000.log").write_text(
        "".join(f"{begin}{line}\n" for line in lines)
    )
    told, code = explain_command([tmp_path], as_json=False)
    assert code == 0 and told.startswith("no failure: the job finished"), told


def test_what_ranks_say_of_one_another_after_the_end_is_no_failure() -> None:
    lost = "[rank1]: RuntimeError: Connection closed by peer [10.0.0.2]:9 (gloo)\n"
    finished = f"{PROGRESS}Training finished\n"
    assert examine(Log.of(finished + lost)).status is Status.FINISHED
    # It was another job's end.
    assert failure(f"{finished}{PROGRESS}{lost}").known.name == "peer-gone"


def test_trouble_that_progress_follows_was_made_good() -> None:
    assert examine(Log.of(OUT_OF_MEMORY + PROGRESS)).status is Status.SURVIVED
    assert examine(Log.of(PROGRESS + OUT_OF_MEMORY)).status is Status.FAILURE


def test_failure_after_trouble_that_was_made_good_is_told() -> None:
    found = failure(f"torch: [Errno 24] Too many open files\n{PROGRESS}{OUT_OF_MEMORY}")
    assert (found.known.name, found.others) == ("out-of-memory", [])


def test_other_rank_that_goes_on_mends_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank-0000.log").write_text(PROGRESS)
    (tmp_path / "rank-0001.log").write_text(OUT_OF_MEMORY)
    assert "[out-of-memory]" in explain_command([tmp_path])[0]


@pytest.mark.parametrize(
    "line", ["test_disk (CUDA out of memory) ... ok", "$ grep 'CUDA out of memory' train.log"]
)
def test_talk_of_an_error_is_none(line: str) -> None:
    assert examine(Log.of(f"torch\n{line}\n")).explanation is None


def test_words_of_all_programs_count_in_the_log_of_a_training_job_only() -> None:
    line = "OSError: [Errno 28] No space left on device"
    assert examine(Log.of(f"npm ERR! code ENOSPC\n{line}\n")).explanation is None
    assert failure(f"[rank0]: saving checkpoint\n{line}\n").known.name == "disk-full"


def test_single_step_without_a_number_is_none_and_more_are_a_failure() -> None:
    line = "{{'loss': {}, 'grad_norm': {}, 'epoch': 0.1}}\n"
    good, skipped, bad = (
        line.format(2.1, 0.5),
        line.format(2.0, "nan"),
        line.format("nan", "nan"),
    )
    assert examine(Log.of(good + skipped + good * 8)).explanation is None
    found = failure(good * 8 + bad * 3)
    assert (found.known.name, found.line.number) == ("nan-loss", 9)


# ---- which rank, which host


@pytest.mark.parametrize(
    ("text", "rank", "host"),
    [
        ("[rank3]: x", 3, None),
        ("[default3]:x", 3, None),
        (" 12: x", 12, None),
        ("[1,6]<stderr>:x", 6, None),
        ("[pod/train-3/pytorch] [rank24]: x", 24, "train-3"),
        ("(RayTrainWorker pid=42, ip=10.0.0.7) [rank5]: x", 5, "10.0.0.7"),
        ("node-3: x", None, None),
        ("node-3:811:899 [5] NCCL WARN x", None, "node-3"),
        ("srun: error: node-7: task 3: Out Of Memory", 3, "node-7"),
        ("[rank9]:[E1 ProcessGroupNCCL.cpp:1] [PG ID 3 PG GUID 7 Rank 1] x", 9, None),
        ("[E1 ProcessGroupNCCL.cpp:1] [PG ID 3 PG GUID 7 Rank 1] x", None, None),
    ],
)
def test_rank_and_host_are_read_from_prefixes(
    text: str, rank: int | None, host: str | None
) -> None:
    line = Log.of(text).line(0)
    assert (line.rank, line.host) == (rank, host)


TIMEOUT = (
    "[rank{rank}]:[E1] [PG ID {group} PG GUID {group} Rank {within}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType={kind}, Timeout(ms)=600000)\n"
)


def test_process_groups_are_never_compared_with_one_another() -> None:
    two = [
        (0, 0, 0, 40, "ALLREDUCE"),
        (1, 0, 1, 40, "ALLREDUCE"),
        (2, 5, 0, 900, "BROADCAST"),
        (3, 5, 1, 900, "BROADCAST"),
    ]
    text = "".join(
        TIMEOUT.format(rank=r, group=g, within=w, number=n, kind=k) for r, g, w, n, k in two
    )
    assert list(failure(text).facts) == ["the limit was 600 s"]


def test_no_lead_where_one_rank_is_read() -> None:
    text = TIMEOUT.format(rank=7, group=0, within=7, number=40, kind="ALLREDUCE")
    assert list(failure(text).facts) == ["the limit was 600 s"]
    assert failure(text).confidence is Confidence.SYMPTOM


def test_line_that_a_terminal_has_cut_is_read_whole() -> None:
    whole = (LOGS / "public/nccl-timeout.log").read_text().splitlines()[0]
    cut = "\n".join(whole[begin : begin + 97] for begin in range(0, len(whole), 97))
    assert failure(cut).known.name == PUBLIC["nccl-timeout"]


def test_earlier_of_two_causes_on_different_hosts_by_their_times() -> None:
    late = LogSource("a.log", "2026-01-01 10:05:00 RuntimeError: CUDA error: out of memory\n")
    early = LogSource(
        "b.log",
        "2026-01-01 10:00:00 NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus\n",
    )
    found = examine(Log([late, early])).explanation
    assert found is not None
    assert (found.known.name, found.line.file, found.confidence) == (
        "gpu-fault",
        "b.log",
        Confidence.LIKELY,
    )


# ---- Flight Recorder dumps


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        (
            "absent",
            "nccl-timeout",
            "operation 4: not started by rank 1 (the last of rank 1 was 3); rank 0 in all_reduce",
        ),
        (
            "different",
            "collective-mismatch",
            "operation 4: rank 0 in all_reduce; rank 1 in broadcast",
        ),
    ],
)
def test_dumps_say_the_first_operation_that_differs(folder: str, name: str, said: str) -> None:
    text, code = explain_command([LOGS / "dumps" / folder])
    assert code == 0
    assert f"[{name}]" in text.splitlines()[0]
    assert said in text


def dump(
    operations: dict[str, list[dict[str, Any]]], members: str = "[0, 1]"
) -> dict[str, Any]:
    entries = [
        {
            "process_group": (group, "dp"),
            "collective_seq_id": number,
            "is_p2p": False,
            "state": "completed",
        }
        | one
        for group, some in operations.items()
        for number, one in enumerate(some, 1)
    ]
    return {
        "version": "2.10",
        "entries": entries,
        "pg_config": {g: {"desc": "dp", "ranks": members} for g in operations},
    }


def differences(folder: Path, *ranks: dict[str, Any]) -> list[str]:
    for rank, content in enumerate(ranks):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return [
        one.text
        for one in first_differences([read_dump(file) for file in sorted(folder.iterdir())])
    ]


def test_each_group_counts_its_own_operations(tmp_path: Path) -> None:
    reduce, gather = (
        {"profiling_name": "nccl:all_reduce"},
        {"profiling_name": "nccl:all_gather"},
    )
    rank_0 = dump({"1": [reduce, reduce], "2": [gather]})
    rank_1 = dump({"1": [reduce], "2": [gather]})
    assert differences(tmp_path, rank_0, rank_1) == [
        "process group 1 (dp), operation 2: not started by rank 1 (the last of rank 1 was 1); rank 0 in all_reduce"
    ]


def test_sizes_that_differ_and_operations_without_end(tmp_path: Path) -> None:
    small, large = (
        {"profiling_name": "nccl:all_reduce", "input_sizes": [[size]]} for size in (4, 5)
    )
    assert differences(tmp_path, dump({"0": [small]}), dump({"0": [large]})) == [
        "process group 0 (dp), operation 1: rank 0 in all_reduce of [[4]]; rank 1 in all_reduce of [[5]]"
    ]
    hangs = {**small, "state": "started"}
    assert differences(tmp_path, dump({"0": [hangs]}), dump({"0": [hangs]})) == [
        "process group 0 (dp), operation 1, all_reduce: started on ranks 0 and 1: all ranks joined"
    ]
    assert differences(tmp_path, dump({"0": [small]}), dump({"0": [small]})) == []


def test_number_that_no_rank_has_is_no_difference(tmp_path: Path) -> None:
    reduce = {"profiling_name": "nccl:all_reduce"}
    gap = [reduce | {"collective_seq_id": number} for number in (1, 10**15)]
    assert differences(tmp_path, dump({"0": gap}), dump({"0": gap})) == []
    scheduled = [*gap[:1], gap[1] | {"state": "scheduled"}]
    assert differences(tmp_path, dump({"0": gap}), dump({"0": scheduled})) == [
        "process group 0 (dp), operation 1000000000000000, all_reduce: completed on rank 0; scheduled on rank 1"
    ]


def test_dump_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(pickle.dumps({"entries": [Evil()]}))
    with pytest.raises(ValueError, match="plain values only"):
        read_dump(file)
    assert not (tmp_path / "ran").exists()
    assert "not read: " in explain_command([tmp_path])[0]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\x80\x02.", b'{"entries": 3}', b"garbage"]
)
def test_file_that_is_no_dump_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a Flight Recorder dump"):
        read_dump(file)


@pytest.mark.parametrize(
    ("read", "name", "error"),
    [(read_dump, "nccl_trace_rank_0", ValueError), (open_dcp, ".metadata", CheckpointError)],
)
def test_spoilt_pickles_take_no_memory(
    tmp_path: Path, read: Any, name: str, error: type[Exception]
) -> None:
    """An empty dict, memorized in place 2 ** 24 of a list of the unpickler's."""
    file = tmp_path / name
    file.write_bytes(b"\x80\x02}r" + (2**24).to_bytes(4, "little") + b".")
    tracemalloc.start()
    with pytest.raises(error):
        read(file if name != ".metadata" else tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7


# ---- a run of ours, several files, JSON


def test_record_of_a_run_is_told(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 2.0 if step < 9 else float("nan")} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 31, "lo'
    )
    events = [
        {"event": "start", "start": 1},
        {"event": "lag", "text": None},
        {"event": "start", "start": 2},
    ]
    events += [{"event": "lag", "text": "rank 3 of host a has been the slowest since step 4"}]
    (tmp_path / "journal.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events)
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0003.log").write_text(OUT_OF_MEMORY)
    text, _ = explain_command([tmp_path])
    for said in (
        "rank 3",
        "the last step in the metrics is 30",
        "not a number from step 9 on",
        "rank 3 of host a has been the slowest since step 4",
        "the run was started 2 times",
    ):
        assert said in text


def test_several_files_are_one_log(tmp_path: Path) -> None:
    first, second = tmp_path / "slurm.out", tmp_path / "dmesg.txt"
    first.write_text("[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]:9 (gloo)\n")
    second.write_text("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus\n")
    text, code = explain_command([first, second])
    assert code == 0
    assert text.splitlines()[0].endswith("[gpu-fault]")
    assert f"{second} line 1" in text


def test_json_has_a_schema_number_and_all_that_the_text_says() -> None:
    told = json.loads(
        explain_command([LOGS / "produced/killed-by-memory.log"], as_json=True)[0]
    )
    assert (told["schema"], told["status"], told["name"]) == (1, "failure", "killed")
    assert told["facts"] == ["rank 1 on localhost failed first, with exit code -9 (SIGKILL)"]
    assert told["line"]["rank"] == 1  # only torchrun names it
    assert (told["retry"], told["several"], told["asked"]) == ("no", False, None)
    assert {
        "confidence",
        "check",
        "steps",
        "line",
        "others",
        "page",
        "cause",
        "title",
    } <= told.keys()
    assert told["line"].keys() == {"file", "number", "rank", "host", "text"}
    unknown, code = explain_command([LOGS / "unrelated/script.log"], as_json=True)
    assert (json.loads(unknown)["status"], json.loads(unknown)["retry"], code) == (
        "unknown",
        "no",
        1,
    )


def test_empty_log_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("")
    assert explain_command([tmp_path / "train.log"])[1] == 1


def test_log_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        f"\x1b]0;title\x07{OUT_OF_MEMORY.strip()}\x1b[2J\x9b31m\n"
    )
    said, _ = explain_command([tmp_path / "train.log"])
    assert not {*said} & {"\x1b", "\x07", "\x9b"}
    assert "CUDA out of memory" in said


def test_long_log_takes_linear_time() -> None:
    line = "[rank{}]: 2026-01-01 10:00:00,000 NCCL INFO error free step {}/100000 loss {:.4f}\n"
    text = "".join(line.format(n % 8, n, 1 / (n + 1)) for n in range(120_000))
    begin = time.process_time()
    assert failure(text + f"[rank3]: {OUT_OF_MEMORY}").line.rank == 3
    assert time.process_time() - begin < 5  # 10 MB; 100 MB take 2 to 8 s of one core


def test_line_that_several_causes_bring_about_is_told_as_a_symptom() -> None:
    found = explain("RuntimeError: DataLoader worker (pid(s) 25) exited unexpectedly")
    assert found is not None and found.confidence is Confidence.SYMPTOM
    assert "only a symptom, its cause is not in this log" in text(
        Diagnosis(Status.FAILURE, found)
    )


def test_usual_cause_of_a_line_is_told_as_such_before_other_errors() -> None:
    found = explain(
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]: FileNotFoundError: [Errno 2] No such file or directory: 'a.json'\n"
        "[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 'loss'\n"
    )
    assert found is not None and (found.known.name, found.confidence) == (
        "missing-file",
        Confidence.SYMPTOM,
    )
    assert "the usual cause, which no line proves" in text(Diagnosis(Status.FAILURE, found))


def test_library_that_cannot_be_opened_is_no_proof_of_another_version() -> None:
    found = explain(
        "import torch\nImportError: libcublas.so.11: cannot open shared object file: No such file or directory"
    )
    assert found is not None and (found.known.name, found.confidence) == (
        "cuda-libraries",
        Confidence.SYMPTOM,
    )


def test_cause_that_ended_no_traceback_beside_an_unknown_one_is_not_claimed() -> None:
    unknown = "Traceback (most recent call last):\n  File \"train.py\", line 3, in main\nKeyError: 'loss'\n"
    warned = "torch: Duplicate GPU detected : rank 1 and rank 0\n"
    found = explain(warned + unknown)
    assert found is not None and (found.known.name, found.confidence) == (
        "nccl-duplicate-gpu",
        Confidence.SYMPTOM,
    )
    found = explain("torch\nXid (PCI:0000:3b:00): 79, GPU has fallen off the bus\n" + unknown)
    assert found is not None and (found.known.name, found.confidence) == (
        "gpu-fault",
        Confidence.LIKELY,
    )


def test_two_causes_claim_neither_unless_the_machine_brought_the_other_about() -> None:
    two = "Duplicate GPU detected : rank 1 and rank 0\nRuntimeError: Default process group has not been initialized"
    found = explain(two)
    assert found is not None and found.confidence is Confidence.SYMPTOM
    found = explain("torch\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0\n" + two)
    assert found is not None and (found.known.name, found.confidence) == (
        "oom-killed",
        Confidence.LIKELY,
    )


def test_proof_comes_before_what_several_causes_bring_about() -> None:
    log = (
        "RuntimeError: CUDA error: an illegal memory access was encountered\n"
        "NVRM: Xid (PCI:0000:cb:00): 94, pid=1, Contained ECC error"
    )
    found = explain(log)
    assert found is not None and found.known.name == "gpu-fault"


def test_warning_that_an_error_came_after_is_no_cause() -> None:
    log = (
        "UserWarning: CUDA initialization: Found no NVIDIA driver on your system\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "train.py", line 3, in main\n'
        "[rank1]: KeyError: 'input_ids'\n"
    )
    found = explain(log)
    assert found is not None and found.known.name == "own-error"
    assert explain(log.splitlines()[0]) is None
    found = explain(log.splitlines()[0] + "\nCUDA available: False\n")
    assert found is not None and found.known.name == "no-cuda"


def test_lines_of_another_program_do_not_count() -> None:
    error = "ModuleNotFoundError: No module named 'yaml'"
    assert explain(f'  File "/srv/django/core/wsgi.py", line 3, in load\n{error}') is None
    assert explain(f"FATAL: PostgreSQL\n{error}") is None
    found = explain(f'  File "train_model.py", line 3, in load\n{error}')
    assert found is not None and found.known.name == "missing-package"
    # A model's "yarn" is no package manager.
    found = explain(f"rope_type: yarn, batch_size: 4\n{error}")
    assert found is not None and found.known.name == "missing-package"


def test_announced_retry_is_no_failure() -> None:
    line = "Retrying (Retry(total=4)) after connection broken by 'Temporary failure in name resolution': /torch/whl"
    assert explain(line) is None


NCCL_READY = "node-1:13:14 [1] NCCL INFO comm 0x7f rank 1 nranks 2 cudaDev 1 busId 25000 - Init COMPLETE\n"


def test_log_that_only_ends_shows_no_hang() -> None:
    assert explain(NCCL_READY) is None
    assert explain(f"It hangs here, and both GPUs are at 100 %:\n{NCCL_READY}") is None


def test_other_way_that_was_found_mends_what_failed() -> None:
    line = "NCCL WARN NET/OFI No eligible providers were found\n"
    assert failure(line).known.name == "libfabric"
    assert (
        explain(f"{line}NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)\n")
        is None
    )


@pytest.mark.parametrize(
    "line",
    [
        "mpirun noticed that process rank 2 with PID 31203 on node node-1 exited on signal 11 (Segmentation fault).",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: *** JOB 86 ON node-1 CANCELLED AT 2021-05-11T12:06:17 DUE TO TIME LIMIT ***",
        "Message:  The node was low on resource: ephemeral-storage.",
        "OSError: [Errno 122] Disk quota exceeded",
    ],
)
def test_words_of_a_launcher_that_starts_any_program_need_a_sign_of_training(line: str) -> None:
    assert explain(line) is None
    assert failure(f"torchrun train.py\n{line}") is not None


@pytest.mark.parametrize(
    "line",
    [
        "No checkpoint found at out/last.pt, training from scratch",
        "No module named 'flash_attn' - will use eager attention",
        "wandb: ERROR Error while calling W&B API: run is finished",
        "  triton_mm_0 inf ms (out of resource: shared memory, Required: 131072, Hardware limit: 101376)",
        "2024-01-01 10:00:00: E xla/cuda_driver.cc:265] failed call to cuInit: CUDA_ERROR_NO_DEVICE: no device",
    ],
)
def test_line_after_which_the_program_goes_on_is_no_failure(line: str) -> None:
    assert explain(f"torch 2.9\n{line}\n") is None


def test_traceback_that_python_ignored_is_no_failure() -> None:
    log = (
        "torch 2.9\nException ignored in: <Finalize object, dead>\nTraceback (most recent call last):\n"
        '  File "/usr/lib/python3.8/multiprocessing/synchronize.py", line 87, in _cleanup\n    sem_unlink(name)\n'
        "FileNotFoundError: [Errno 2] No such file or directory\n"
    )
    assert explain(log) is None
    found = explain(log + OUT_OF_MEMORY)
    assert found is not None and found.known.name == "out-of-memory"


def test_another_programs_name_takes_nothing_away_from_a_training_log() -> None:
    line = "PermissionError: [Errno 13] Permission denied: '/models/cache'"
    for name in ("", "celery ", "/scratch/climate/", "genome.yaml of "):
        assert explain(f"{name}torch 2.9\n{line}\n") is not None
    assert explain(f"celery worker\n{line}\n") is None
    found = explain(f"celery worker with torch 2.9\n{OUT_OF_MEMORY}")
    assert found is not None and found.known.name == "out-of-memory"


def test_folder_has_text_and_compressed_logs(tmp_path: Path) -> None:
    (tmp_path / "node0.txt").write_text("starting\n")
    (tmp_path / "node1.gz").write_bytes(gzip.compress(OUT_OF_MEMORY.encode()))
    (tmp_path / "node2.gz").write_bytes(b"none")
    evidence = gather([tmp_path])
    assert len(evidence.sources) == 2
    assert "node2.gz cannot be unpacked" in evidence.unread[0]
    found = answer(evidence).explanation
    assert found is not None and found.known.name == "out-of-memory"


def test_nested_brackets_and_reversed_text_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0.json").write_text('{"a":' + "[" * 200_000)
    assert "is not a Flight Recorder dump" in gather([tmp_path]).unread[0]
    assert explain('{"log":' + "[" * 200_000) is None
    assert "\u202e" not in text(
        answer(JobEvidence([LogSource("", "RuntimeError: \u202eabc\n")]))
    )


def test_of_a_log_that_is_too_large_both_ends_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("_FIRST", 3000), ("_LAST", 9000), ("_SAMPLE", 1000)):
        monkeypatch.setattr(evidence, name, size)
    filler = "".join(f"step {step}\n" for step in range(200_000)).encode()
    begin, end = b"torch: [Errno 24] Too many open files\n", OUT_OF_MEMORY.encode()
    (tmp_path / "a.log").write_bytes(begin + filler + end)
    (tmp_path / "b.gz").write_bytes(gzip.compress(begin + filler + end))
    (tmp_path / "c.log").write_bytes(begin + filler[:8000] + end)
    large, packed, small = (gather([tmp_path / name]) for name in ("a.log", "b.gz", "c.log"))
    for one in (large, packed):
        assert len(one.sources[0].text) < 13_000
        assert one.sources[0].text.startswith(begin.decode()) and one.sources[0].text.endswith(
            OUT_OF_MEMORY
        )
        assert one.unread[0].endswith("were not read, nor are their lines counted")
    assert small.unread == [] and len(small.sources[0].text) == len(begin) + 8000 + len(end)
    monkeypatch.setattr(evidence, "_MOST_UNPACKED", 100_000)
    assert gather([tmp_path / "b.gz"]).unread == [
        f"{tmp_path / 'b.gz'} unpacks to more than 0 GiB"
    ]
    assert gather([tmp_path / "a.log"]).sources[0].text == large.sources[0].text


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.out").write_bytes(bytes(range(128, 256)) * 100)
    (tmp_path / "train.log").write_bytes(b"\xff\xfe" + OUT_OF_MEMORY.encode() * 3)
    told = gather([tmp_path])
    assert told.unread == [f"{tmp_path / 'weights.out'} is not text"]
    found = answer(told).explanation
    assert found is not None and found.known.name == "out-of-memory"
    with pytest.raises(ConfigError, match="what was piped in is not text"):
        evidence.piped(io.BytesIO(bytes(range(128, 256)) * 100))
