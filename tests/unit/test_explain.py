"""`threefold explain` on collected logs: the cause, the line that matters, `unknown` for other programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from logs import field
from logs.cases import EXAMPLES, PRODUCED, PUBLIC, UNRELATED
from logs.collect import STARTS
from threefold.commands.explain import explain_command
from threefold.errors import ConfigError
from threefold.explain.explain import Explanation, explain
from threefold.explain.known import PAGES, known_errors, read_page
from threefold.explain.log import Log
from threefold.explain.sources.tracebacks import raised

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests/logs"


def explained(folder: str, name: str) -> Explanation:
    found = explain((LOGS / folder / f"{name}.log").read_text())
    assert found is not None, "unknown"
    return found


def failure(text: str) -> Explanation:
    found = explain(text)
    assert found is not None, "unknown"
    return found


@pytest.mark.parametrize("name", PRODUCED)
def test_log_of_a_program_that_failed_here(name: str) -> None:
    assert explained("produced", name).known.name == PRODUCED[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_lines_of_a_public_thread(name: str) -> None:
    assert explained("public", name).known.name == PUBLIC[name]
    source = (LOGS / "public" / f"{name}.log").read_text().splitlines()[-1]
    assert re.fullmatch(r"\[from https://github\.com/[\w./-]+/issues/\d+\]", source)


@pytest.mark.parametrize("name", UNRELATED)
def test_log_of_another_kind_is_unknown(name: str) -> None:
    assert explain((LOGS / "unrelated" / f"{name}.log").read_text()) is None


def test_there_are_enough_logs_and_every_one_is_used() -> None:
    assert len(PRODUCED) + len(PUBLIC) >= 25
    assert len(UNRELATED) >= 10
    for folder, names in (("produced", PRODUCED), ("public", PUBLIC), ("unrelated", UNRELATED)):
        assert {path.stem for path in (LOGS / folder).iterdir()} == set(names)


def test_there_are_pages_for_the_causes_of_all_logs() -> None:
    known = known_errors()
    field_causes = {
        log.cause for half in ("write", "judge") for log in field.logs(half) if log.cause
    } - {"other"}
    assert {*PRODUCED.values(), *PUBLIC.values(), *field_causes} <= known.keys()
    assert len(known) >= 120


def test_every_produced_log_can_be_made_anew() -> None:
    assert set(STARTS) == set(PRODUCED)


def test_message_of_threefold_is_shown_whole() -> None:
    found = explained("produced", "threefold-batch")
    assert (
        found.line.text == "train.global_batch = 15 cannot be divided equally among 2 dp ranks"
    )
    assert list(found.facts) == [
        "expected: a multiple of mesh.dp (2), so that every dp rank makes the same number of steps",
        "fix: --train.global_batch 16   (or 14)",
    ]


def test_part_of_a_message_of_threefold_is_none() -> None:
    for part in ("  fix: a", "b\n  fix: a", "  expected: b\n  fix: a", "c\nb\n  fix: a"):
        assert explain(part) is None
    found = explain("c\n  expected: b\n  fix: a")
    assert found is not None and (found.line.text, list(found.facts)) == (
        "c",
        ["expected: b", "fix: a"],
    )


def test_rank_that_was_done_before_the_others_is_no_failure() -> None:
    found = explained("produced", "uneven-epoch")
    assert found.facts[-1] == (
        "no other rank has failed: the missing one finished before the others (uneven batches?)"
    )


def test_every_error_is_found_by_its_own_example() -> None:
    errors = known_errors()
    assert EXAMPLES.keys() == errors.keys()
    for known in errors.values():
        found = _all_hits(EXAMPLES[known.name])
        assert not known.signs or any(hit.known.name == known.name for hit in found), known.name
    assert {name for name, one in errors.items() if not one.signs} == {
        "own-error",
        "threefold",
    }


def test_page_is_all_that_a_new_error_needs(tmp_path: Path) -> None:
    page = (
        (PAGES / "out-of-memory.md")
        .read_text()
        .replace("(CUDA|HIP) out of memory\n", "the quux is empty\n", 1)
    )
    (tmp_path / "empty-quux.md").write_text(
        page.replace("# a GPU's memory is used up", "# a quux is empty")
    )
    found = explain("[rank2]: torch: the quux is empty\n", pages=tmp_path)
    assert found is not None
    assert (found.known.name, found.known.title, found.line.rank) == (
        "empty-quux",
        "a quux is empty",
        2,
    )


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("OSError: [Errno 28] No space left on device: '/data/a'", "disk-full"),
        ("failed to extend /dev/shm/nccl-a: No space left on device", "shared-memory"),
        ("host='pypi.org': Max retries exceeded (NameResolutionError)", "unknown-host"),
        (
            "host='huggingface.co': Max retries exceeded (NameResolutionError)",
            "hub-unreachable",
        ),
    ],
)
def test_line_that_shows_another_error_is_of_that_page_alone(line: str, name: str) -> None:
    found = explain(f"torch 2.9\n{line}\n")
    assert found is not None and (found.known.name, found.others) == (name, [])


def test_page_of_another_form_is_refused(tmp_path: Path) -> None:
    page, whole = tmp_path / "half.md", (PAGES / "disk-full.md").read_text()
    keys_of_others = (
        whole.replace("    signs:", "    sign:"),
        whole.replace("    signs:", "    signs"),
    )
    for text in (whole.partition("- ")[0], *keys_of_others):
        page.write_text(text)
        with pytest.raises(ValueError, match=r"half\.md is not written as"):
            read_page(page)


def _all_hits(text: str) -> list[Explanation]:
    found = explain(f"torch\n{text}\n")
    return [] if found is None else [found, *found.others]  # type: ignore[list-item]


def test_rank_that_failed_is_told_from_ranks_that_only_lost_it() -> None:
    found = explained("produced", "own-error")
    assert found.line.text == "KeyError: 'input_ids'"
    assert found.line.rank == 1
    assert found.frame is not None and found.frame.startswith("train.py:")
    assert "child-failed" in {hit.known.name for hit in found.others}


def test_rank_of_a_host_that_its_launcher_names_first_is_told() -> None:
    line = "torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -11) local_rank: 3 (pid: 7)"
    found = explain(f"{line}\n  rank      : 1 (local_rank: 1)")
    assert found is not None
    assert list(found.facts) == ["local_rank 3 failed first, with exit code -11 (SIGSEGV)"]


@pytest.mark.parametrize(
    "line",
    [
        "[launch.py:434:sigkill_handler] ['python', '-u', 'train.py', '--local_rank=1'] exits with return code = -7",
        "Global rank 2 (PID 812) of train.py exited with exit code -6",
        "  exitcode  : -4 (pid: 812)",
    ],
)
def test_negative_exit_code_of_a_crash_is_told_as_one(line: str) -> None:
    found = explain(f"torchrun train.py\n{line}\n")
    assert found is not None and found.known.name == "segmentation-fault"
    own = line.replace("-7", "7").replace("-6", "6").replace("-4", "4")
    found = explain(f"torchrun train.py\n{own}\n")
    assert found is None or found.known.name != "segmentation-fault"


@pytest.mark.parametrize(
    "line",
    [
        "[12345.678] python[4242]: segfault at 8 ip 7f1 sp 7ff error 4 in libc10_cuda.so[7f2+5c000]",
        "n1 kernel: traps: pt_main_thread[42] general protection fault ip:7f in libtorch_cpu.so[7f+1]",
    ],
)
def test_crash_that_only_the_kernel_names_is_told_if_it_is_of_python(line: str) -> None:
    found = explain(f"torchrun train.py\n{line}\n")
    assert found is not None and found.known.name == "segmentation-fault"
    other = line.replace("python", "nvtop").replace("pt_main_thread", "Xorg")
    assert explain(f"torchrun train.py\n{other}\n") is None


def test_ninja_that_failed_without_its_output_is_a_build_that_failed() -> None:
    error = "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1."
    found = explain(f"torchrun train.py\n{error}\n")
    assert found is not None and found.known.name == "extension-build"


_TABLE = """torchrun train.py
Failures:
[1]:
  host      : a
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 9)
Root Cause (first observed failure):
[0]:
  host      : a
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 8)
"""


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        # The entry of the table that the line is in, else the first failure.
        (_TABLE.replace("-9", "1"), 2),
        (_TABLE, 3),
        ("torch.distributed.elastic.ChildFailedError:\n" + _TABLE.replace("-9", "1"), 3),
        ("failed (exitcode: -9) local_rank: 1 (pid: 8) of binary: python\n" + _TABLE, 3),
        ("[rank5]: failed (exitcode: -9) local_rank: 1 (pid: 8)\n" + _TABLE, 5),
        # Which rank of the job it is, nobody says.
        ("torch: failed (exitcode: -9) local_rank: 1 (pid: 8) of binary: python\n", None),
        # What is no end of a process is of no rank because one failed first.
        ("torch.OutOfMemoryError: CUDA out of memory.\n" + _TABLE, None),
    ],
)
def test_rank_that_only_the_launcher_names_is_that_of_its_line(
    text: str, rank: int | None
) -> None:
    found = explain(text)
    assert found is not None and found.line.rank == rank, found.line


def test_process_that_was_killed_explains_lost_connections() -> None:
    found = explained("produced", "killed-by-memory")
    assert list(found.facts) == [
        "rank 1 on localhost failed first, with exit code -9 (SIGKILL)"
    ]
    assert {"peer-gone", "child-failed"} <= {hit.known.name for hit in found.others}


def test_gpu_memory_says_by_how_much_it_was_short() -> None:
    assert list(explained("public", "out-of-memory").facts) == [
        "22 MiB were requested and 11.06 MiB are free: at least 10.94 MiB short",
        "194.9 MiB are reserved but unallocated, which would be enough: start with step 1",
    ]
    assert list(explained("public", "out-of-memory--large").facts) == [
        "30.29 GiB were requested and 3.69 GiB are free: at least 26.6 GiB short",
        "only 396.6 MiB are reserved but unallocated, so step 1 will not be enough",
    ]


def test_memory_of_other_processes_is_named() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
        "80.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 39.00 GiB memory in use."
    )
    found = explain(text)
    assert found is not None
    assert "40 GiB of this GPU belong to other processes: nvidia-smi lists them" in found.facts


def test_gpu_without_any_free_memory_is_told_so() -> None:
    text = (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of "
        "6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch."
    )
    found = explain(text)
    assert found is not None and list(found.facts) == [
        "1.7 GiB were requested and 0 bytes are free: at least 1.7 GiB short"
    ]


def test_nccl_timeout_says_who_did_not_come() -> None:
    assert (
        "ranks 1 and 2 did not report this timeout: look there first"
        in explained("public", "nccl-timeout").facts
    )
    # Not all of these lines name a process group: the operations may be of several.
    assert explained("public", "nccl-timeout--epoch-end").facts == ["the limit was 600 s"]
    assert explained("public", "nccl-timeout--progress-bar").facts == ["the limit was 1800 s"]


def _caught(rank: int, in_group: int, number: int, kind: str) -> str:
    return (
        f"[rank{rank}]:[E126 01:17:58.1 ProcessGroupNCCL.cpp:616] [Rank {in_group}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, Timeout(ms)=600000) ran for 600002 ms.\n"
    )


def _named(rank: int, group: str, in_group: int, number: int) -> str:
    return (
        f"[rank{rank}]:[E126 01:17:58.2 ProcessGroup.cpp:1785] [PG ID {group} PG GUID {group}(mesh) Rank {in_group}]"
        f" Exception (either an error or timeout) detected by watchdog at work: {number}, last enqueued NCCL work: "
        f"{number + 2}, last completed NCCL work: {number - 1}.\n"
    )


def test_operations_of_two_process_groups_are_not_compared() -> None:
    """Rank 3 of a 2 x 2 mesh is late: rank 2 waits for it in one group, rank 1 in the other."""
    for number, kind in ((50, "ALLREDUCE"), (900, "_ALLGATHER_BASE")):
        caught = _caught(2, 0, 900, "ALLREDUCE") + _caught(1, 0, number, kind)
        named = _named(2, "2", 0, 900) + _named(1, "1", 0, number)
        for text in (caught, caught + named):
            found = explain(text)
            assert found is not None and list(found.facts) == ["the limit was 600 s"]
    late = explain(
        _caught(1, 1, 50, "ALLREDUCE")
        + _named(1, "1", 1, 50)
        + _caught(0, 0, 51, "ALLREDUCE")
        + _named(0, "1", 0, 51)
    )
    assert (
        late is not None
        and "rank 1 lagged behind the others (operation 50 of 51): look there" in late.facts
    )


def _newer(rank: int, number: int, enqueued: int) -> str:
    return (
        f"[rank{rank}]:[E126 01:17:58.2 ProcessGroupNCCL.cpp:2271] [PG ID 1 PG GUID 1(dp) Rank {rank}]  failure "
        f"detected by watchdog at work sequence id: {number} PG status: last enqueued work: {enqueued}, "
        "last completed work: 6\n"
    )


def test_newer_watchdog_says_who_lagged() -> None:
    for numbers, said in (
        ((7, 8), "rank 0 lagged behind the others (operation 7 of 8): look there"),
        ((7, 7), "rank 0 had started the fewest operations (9): look there first"),
    ):
        lines = [
            _caught(rank, rank, number, "ALLREDUCE") + _newer(rank, number, 9 + rank)
            for rank, number in enumerate(numbers)
        ]
        assert said in failure("".join(lines)).facts


def test_rank_whose_lines_name_no_group_is_not_silent() -> None:
    named = [
        _caught(rank, rank, 7, "ALLREDUCE") + _named(rank, "0", rank, 7) for rank in (0, 1, 3)
    ]
    text = "".join(named)
    assert "rank 2 did not report this timeout: look there first" in failure(text).facts
    assert failure(text + _caught(2, 2, 7, "ALLREDUCE")).facts == ["the limit was 600 s"]


def test_group_that_is_never_made_names_the_rank_that_did_not_come() -> None:
    bar = "Running tokenizer on dataset (num_proc=8):  47%|####  | 3169000/6811963 [30:11<38:27, 1578.58 examples/s]\n"
    error = (
        "[rank1]: RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
        "key-value store by key '0', but store->get('0') got error: "
    )
    found = failure(f"{bar}{error}Socket Timeout\n")
    assert (found.known.name, found.facts) == (
        "nccl-timeout",
        [
            "rank 0 of the group did not come: look there first",
            "not done by then: Running tokenizer on dataset (num_proc=8):  47%",
        ],
    )
    done = bar.replace(" 47%", "100%")
    assert failure(f"{bar}{done}{error}Socket Timeout\n").facts == found.facts[:1]
    assert failure(f"{bar}{error}Connection reset by peer\n").known.name == "store-lost"


_NCCL = (
    "[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n[rank1]: ncclSystemError: System call failed.\n"
)


def test_reason_that_nccl_gives_is_told(tmp_path: Path) -> None:
    reason = "nvmlDeviceGetHandleByPciBusId() failed: Not Found"
    for lines in (
        f"{_NCCL}[rank1]: Last error:\n[rank1]: {reason}\n",
        f"n1:97:02 [2] misc/nvmlwrap.cc:187 NCCL WARN {reason}\n{_NCCL}",
    ):
        (tmp_path / "train.log").write_text(lines)
        text, _ = explain_command([tmp_path / "train.log"])
        assert f"  NCCL's reason: {reason}\n" in text and "not in this log" not in text
    (tmp_path / "train.log").write_text(_NCCL)
    assert "not in this log" in explain_command([tmp_path / "train.log"])[0]


def test_setting_in_a_message_is_no_level_of_a_log() -> None:
    line = "[1]<stderr>:RuntimeError: ncclCommInitRank failed: unhandled cuda error (run with NCCL_DEBUG=INFO)\n"
    assert failure(line).known.name == "nccl-internal"
    assert explain(line.replace("RuntimeError:", "INFO retried:")) is None


def test_nvml_that_does_not_start_is_told_by_what_follows() -> None:
    assert (
        failure("[rank0]: RuntimeError: Can't initialize NVML\n").known.name == "container-gpu"
    )
    error = "[rank0]: Failed to initialize NVML: Driver/library version mismatch\n"
    found = failure(error)
    assert found.known.name == "nvml-mismatch"
    assert "container-gpu" not in {hit.known.name for hit in found.others}


def test_reason_that_has_a_page_comes_before_the_error_of_nccl() -> None:
    found = failure(
        f"{_NCCL}[rank1]: Last error:\n[rank1]: Net : Connection closed by remote peer n2<43236>\n"
    )
    assert [found.known.name, *(hit.known.name for hit in found.others)] == [
        "peer-gone",
        "nccl-internal",
    ]


def test_error_of_another_rank_is_not_of_the_place_that_it_is_raised_in() -> None:
    frame = '  File "/venv/lib/python3.10/site-packages/deepspeed/runtime/zero/stage3.py", line 355, in step\n'
    begin = f"Traceback (most recent call last):\n{frame}    self.reduce()\n"
    assert failure(f"{begin}ValueError: an odd path\n").known.name == "zero3-model-size"
    assert (
        failure(
            f"{begin}RuntimeError: NCCL error in: a.cpp:1269, unhandled system error\n"
        ).known.name
        == "nccl-internal"
    )


def test_assertion_without_words_has_those_of_its_line() -> None:
    text = (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/venv/lib/python3.11/site-packages/deepspeed/'
        'runtime/bf16_optimizer.py", line 316, in step\n[rank1]:     assert all_groups_norm > 0.\n'
        "[rank1]:            ^^^^^^^^^^^^^^^^^^^^\n[rank1]: AssertionError\n"
    )
    found = failure(text)
    assert (found.known.name, found.line.rank, found.line.number) == ("nan-loss", 1, 5)
    assert failure(text.replace("all_groups_norm", "norm")).known.name == "own-error"


def _raised(function: str, error: str) -> str:
    return (
        f'[rank2]: Traceback (most recent call last):\n[rank2]:   File "/app/save.py", line 3, in {function}\n'
        f"[rank2]:     call(path)\n[rank2]: {error}\n"
    )


@pytest.mark.parametrize(
    ("function", "error", "name"),
    [
        (
            "makedirs",
            "FileExistsError: [Errno 17] File exists: '/data/checkpoint-50'",
            "checkpoint-race",
        ),
        (
            "save",
            "OSError: [Errno 39] Directory not empty: '/data/tmp' -> '/data/50'",
            "checkpoint-race",
        ),
        (
            "_rmtree_safe_fd",
            "FileNotFoundError: [Errno 2] No such file or directory: 'a.pt'",
            "checkpoint-race",
        ),
        (
            "_remove_checkpoint",
            "FileNotFoundError: [Errno 2] No such file or directory: '/x'",
            "checkpoint-race",
        ),
        (
            "save",
            "FileNotFoundError: [Errno 2] No such file or directory: '/x/tmp-checkpoint-7'",
            "checkpoint-race",
        ),
        (
            "read",
            "FileNotFoundError: [Errno 2] No such file or directory: '/x'",
            "missing-file",
        ),
    ],
)
def test_ranks_that_change_one_folder_are_told_from_a_file_that_is_not_there(
    function: str, error: str, name: str
) -> None:
    assert failure(_raised(function, error)).known.name == name


def test_folder_that_a_shell_cannot_remove_ends_no_training() -> None:
    done = "{'train_runtime': 42.1, 'train_loss': 0.7, 'epoch': 1.0}\n"
    assert explain(f"{done}rm: cannot remove '/scratch/job': Directory not empty\n") is None


@pytest.mark.parametrize(
    ("number", "name", "page", "retry"),
    [
        (1, "SIGHUP", "session-closed", "yes"),
        (2, "SIGINT", "stopped", "no"),
        (15, "SIGTERM", "stopped", "no"),
    ],
)
def test_signal_of_a_closed_session_is_told_from_a_request(
    number: int, name: str, page: str, retry: str
) -> None:
    found = failure(
        f"W0920 09:10:41.194000 84933 distributed/elastic/agent/server/api.py:719] Received {number} death signal\n"
        f"W0920 09:10:41.195000 84933 distributed/elastic/multiprocessing/api.py:900] Sending process 85 closing "
        f"signal {name}\ntorch.distributed.elastic.multiprocessing.api.SignalException: Process 84 got signal: "
        f"{number}\n"
    )
    assert (found.known.name, found.known.retry, found.others) == (page, retry, [])


def test_worker_that_dies_after_the_last_step_is_no_failure() -> None:
    died = "(raylet) A worker died or was killed while executing a task by an unexpected system error.\n"
    step = "(TaskRunner pid=31) step:1 - actor/pg_loss:-0.004 - actor/kl_loss:0.001\n"
    bar = "Training Progress:  99%|##| 99/100 [03:34<00:02, 2.1s/it]\n"
    assert failure(step + bar + died).known.name == "ray-worker-died"
    assert (
        explain(step + bar.replace(" 99%", "100%").replace("99/100", "100/100") + died) is None
    )


def test_cause_comes_before_what_follows_from_it() -> None:
    text = (
        "[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error\n"
        "[rank0]:[E1] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)\n"
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    found = explain(text)
    assert found is not None
    assert (found.known.name, found.line.rank) == ("out-of-memory", 1)
    assert [hit.known.name for hit in found.others] == ["nccl-timeout", "peer-gone"]


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("[rank3]: KeyError: 1", 3),
        ("[default2]:[rank2]: KeyError: 1", 2),
        ("5: KeyError: 1", 5),
        ("[1,6]<stderr>:KeyError: 1", 6),
        ("[6]<stderr>:KeyError: 1", 6),
        ("trainer.main/1 KeyError: 1", None),
        ("2026-01-01T10:00:00.123456789Z stderr F [rank3]: KeyError: 1", 3),
        ("2026-01-01 10:00:00,123 KeyError: 1", None),
        ("KeyError: 1", None),
    ],
)
def test_ranks_are_read_from_the_prefixes_of_launchers(text: str, rank: int | None) -> None:
    line = Log.of(text).line(0)
    assert (line.rank, line.text) == (rank, "KeyError: 1")


def test_traceback_behind_a_progress_bar() -> None:
    errors = raised(
        Log.of(
            "  1%| | 10/1752 [00:29]\r  2%| |Traceback (most recent call last):\nKeyError: 1\n"
        )
    )
    assert [error.line.number for error in errors] == [2]


def test_text_of_an_explanation() -> None:
    text, code = explain_command([LOGS / "public/device-mismatch.log"])
    assert code == 0
    assert text.splitlines()[:4] == [
        "an operation got tensors on different devices  [device-mismatch]",
        "  line 1: RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu "
        "and cuda:0! (when checking argument for argument mat2 in method wrapper_mm)",
        "",
        "cause: A batch or a buffer stayed on the CPU or on another GPU while the model is on this rank's GPU.",
    ]
    assert text.splitlines()[-1] == f"more: {PAGES}/device-mismatch.md"


def test_unknown_names_the_last_error(tmp_path: Path) -> None:
    log = (
        'Traceback (most recent call last):\n  File "<string>", line 4, in <module>\n'
        '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 134, in forward\n'
        "    return F.linear(input, self.weight, self.bias)\nRuntimeError: an error of its own (2x5 and 4x4)\n"
    )
    (tmp_path / "train.log").write_text(log)
    text, code = explain_command([tmp_path / "train.log"])
    assert code == 1
    assert text.splitlines() == [
        "unknown: threefold does not know any error in this log",
        "  its most telling lines:",
        '    line 3: File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 134, in forward',
        "    line 4: return F.linear(input, self.weight, self.bias)",
        "    line 5: RuntimeError: an error of its own (2x5 and 4x4)",
        f"  the errors that it does know: {PAGES}",
    ]


def test_folder_of_logs_is_read_with_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0000.log").write_text(
        "RuntimeError: Connection closed by peer [10.0.0.2]:9 (gloo)\n"
    )
    (tmp_path / "logs/rank-0003.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    text, code = explain_command([tmp_path])
    assert code == 0
    assert "out-of-memory" in text.splitlines()[0]
    assert "rank 3" in text.splitlines()[1]


def test_of_a_resumed_run_the_last_start_counts(tmp_path: Path) -> None:
    begin = '2026-01-01 10:00:00,000 INFO threefold.start: {"process": 4242}\n'
    (tmp_path / "rank-0001.log").write_text(
        f"{begin}torch.OutOfMemoryError: CUDA out of memory.\n{begin}torch: [Errno 24] Too many open files\n"
    )
    assert explain_command([tmp_path])[0].splitlines()[0].endswith("[open-files]")


def test_missing_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        explain_command([tmp_path / "train.log"])
    assert str(error.value) == (
        f"{tmp_path}/train.log does not exist\n"
        "  expected: a log, or a folder with .log, .err, .out, .txt or .gz files\n"
        "  fix: threefold explain train.log, or a pipe: ... 2>&1 | threefold explain"
    )
    with pytest.raises(ConfigError, match="contains no log"):
        explain_command([tmp_path])


def test_command_reads_a_pipe_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['threefold', 'explain']\n"
        "from threefold.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    log = (LOGS / "produced/mixed-dtensor.log").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", code], input=log, capture_output=True, timeout=180
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"an operation got a plain and a distributed tensor")


def test_logs_name_no_machine() -> None:
    for path in LOGS.rglob("*.log"):
        text = path.read_text()
        assert str(ROOT) not in text and sys.prefix not in text, path


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("RuntimeError: Expected all tensors to be on the same device", "device-mismatch"),
        ("RuntimeError: Expected all tensors on same device", "device-mismatch"),
        ("Watchdog caught collective operation timeout", "nccl-timeout"),
        ("CUDA out of memory", "out-of-memory"),
        ("Expected to have finished reduction in the prior iteration", "ddp-unused-parameters"),
        ("Address already in use", "address-in-use"),
        ("RuntimeError: Address already in use", "address-in-use"),
        ("OSError: [Errno 98] Address already in use", "address-in-use"),
    ],
)
def test_common_error_is_known_by_its_bare_line(line: str, name: str) -> None:
    found = explain(f"{line}\n")
    assert found is not None and found.known.name == name


@pytest.mark.parametrize(
    ("cause", "follows", "name"),
    [
        (
            "[n1:81] Caught signal 11 (Segmentation fault: address not mapped)",
            "ActorDiedError: it died",
            "segmentation-fault",
        ),
        (
            "amdgpu 0000:c1:00.0: amdgpu: uncorrectable hardware error",
            "HW Exception by GPU node-2: GPU Hang",
            "gpu-fault",
        ),
        (
            "slurmstepd: error: pyxis: couldn't start container",
            "srun: error: n1: task 0: Exited with",
            "container-start",
        ),
        (
            "OSError: [Errno 108] Cannot send after transport endpoint shutdown",
            "exitcode: 1 (pid: 8)",
            "io-error",
        ),
    ],
)
def test_cause_in_the_log_comes_before_what_a_launcher_says(
    cause: str, follows: str, name: str
) -> None:
    found = explain(f"torchrun train.py\n{cause}\n{follows}\n")
    assert found is not None and found.known.name == name


def of_rank(text: str) -> str:
    return "".join(f"[rank1]: {line}\n" for line in text.splitlines())


RAISED_BY_A_PACKAGE = """Traceback (most recent call last):
  File "/srv/load.py", line 9, in <module>
    rows = load()
  File "/opt/venv/lib/python3.12/site-packages/{file}", line 9, in read
    raise error
{error}
"""


@pytest.mark.parametrize(
    ("file", "error", "name"),
    [
        ("pandas/io/parsers.py", "ParserError: line 4, saw 3", "dataset-rows"),
        ("jinja2/environment.py", "UndefinedError: 'tools' is undefined", "chat-template"),
        ("numpy/core/a.py", "ParserError: line 4, saw 3", "own-error"),
        ("PIL/_binary.py", "struct.error: unpack requires a buffer of 4 bytes", "dataset-rows"),
        (
            "botocore/parsers.py",
            "ResponseParserError: Unable to parse response",
            "object-store",
        ),
    ],
)
def test_error_that_no_page_has_words_of_is_told_by_the_package_that_raised_it(
    file: str, error: str, name: str
) -> None:
    text = RAISED_BY_A_PACKAGE.format(file=file, error=error)
    assert explain(text) is None  # any program may have raised it
    found = explain(of_rank(text))
    assert found is not None and (found.known.name, found.confidence) == (
        name,
        "only a symptom",
    )


def test_traceback_whose_heading_is_cut_off_ends_with_an_error() -> None:
    text = RAISED_BY_A_PACKAGE.format(file="x/y.py", error="KeyError: 'labels'")
    found = explain(of_rank(text[text.index("    rows") :]))
    assert found is not None
    assert (found.known.name, found.line.text) == ("own-error", "KeyError: 'labels'")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("torch/distributed/fsdp/wrap.py", "fsdp-root"),
        ("torch/distributed/tensor/_ops.py", "dtensor-operator"),
        ("deepspeed/runtime/zero/stage3.py", "zero3-model-size"),
        ("megatron/training/arguments.py", "wrong-arguments"),
        ("trl/trainer/sft_trainer.py", "own-error"),
    ],
)
def test_error_that_no_page_has_words_of_is_told_by_the_part_of_the_library(
    file: str, name: str
) -> None:
    found = explain(of_rank(RAISED_BY_A_PACKAGE.format(file=file, error="ValueError: no")))
    assert found is not None
    assert (found.known.name, found.confidence) == (name, "only a symptom")


@pytest.mark.parametrize(
    "traceback",
    [
        """Traceback (most recent call last):
  File "/srv/train.py", line 9, in main
    trainer.fit(model)
  File "/opt/venv/lib/python3.12/site-packages/lightning/pytorch/loops/loop.py", line 80, in run
    raise RuntimeError("no batch")""",
        """RuntimeError                              Traceback (most recent call last)
/srv/train.py in main(args)
----> 9     trainer.fit(model)
/opt/venv/lib/python3.12/site-packages/lightning/pytorch/loops/loop.py in run(self)
---> 80     raise RuntimeError("no batch")""",
        """RuntimeError                              Traceback (most recent call last)
File /srv/train.py:9, in main(args)
----> 9     trainer.fit(model)
File /opt/venv/lib/python3.12/site-packages/lightning/pytorch/loops/loop.py:80, in run(self)
---> 80     raise RuntimeError("no batch")""",
        """╭───────────── Traceback (most recent call last) ─────────────╮
│ /srv/train.py:9 in main                                     │
│ ❱  9 │   trainer.fit(model)                                 │
│ /opt/venv/lib/python3.12/site-packages/lightning/loop.py:80 │
│ in run                                                      │
╰─────────────────────────────────────────────────────────────╯""",
    ],
    ids=["python", "older IPython", "IPython", "rich"],
)
def test_error_of_a_library_in_training_is_told_with_the_program_s_place(
    traceback: str,
) -> None:
    found = explain(f"step 1\n{traceback}\nRuntimeError: no batch\n")
    assert found is not None and found.frame is not None
    assert (found.known.name, found.line.text) == ("own-error", "RuntimeError: no batch")
    assert re.fullmatch(r"/srv/train\.py:[9?] in main", found.frame)


def test_error_of_a_program_that_only_runs_a_model_is_unknown() -> None:
    text = RAISED_BY_A_PACKAGE.format(file="diffusers/pipeline.py", error="ValueError: no")
    assert explain(text) is None
    assert explain(f"{text}Epoch 3\n") is not None


def test_ranks_that_raised_the_first_error_are_told_and_how_many_errors_followed() -> None:
    error = RAISED_BY_A_PACKAGE.format(file="x/y.py", error="ValueError: {}")
    later = of_rank(error.format("another"))
    same = of_rank(error.format("no"))
    found = explain(same + same.replace("rank1", "rank0") + later)
    assert found is not None and found.line.text == "ValueError: no"
    assert list(found.facts) == ["it ended ranks 0 and 1", "errors after it: 1"]


_FRAMES = """Traceback (most recent call last):
  File "/srv/train.py", line 33, in main
    rows = table["text"]
"""
_JSON = json.dumps({"message": f"{_FRAMES}KeyError: 'text'", "level": "error"})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "ChildFailedError:\ntrain.py FAILED\n  traceback : "
            + f"{_FRAMES}KeyError: 'text'\n===".replace("\n", "\n  "),
            "KeyError: 'text'",
        ),
        (f'error_handler:{{"py_callstack": {_JSON}', "KeyError: 'text'"),
        (
            f"wandb: ERROR Run errored: {RuntimeError(_FRAMES + 'KeyError: x' + chr(10))!r}",
            "KeyError: x",
        ),
        (f"{_FRAMES}queue.Empty", "queue.Empty"),
        (f"{_FRAMES}StopIteration", "StopIteration"),
        (f"{_FRAMES}lib._exc.Unsupported: a call", "lib._exc.Unsupported: a call"),
        (
            f"  + Exception Group {_FRAMES}ExceptionGroup: unhandled (1 sub-exception)\n".replace(
                "\n", "\n  | "
            )
            + f"+---- 1 ----\n    | {_FRAMES}KeyError: 'text'".replace("\n", "\n    | "),
            "| KeyError: 'text'",
        ),
        (
            f"{_FRAMES}KeyError: 'text'\n\nThe above exception was the direct cause of the following exception:\n\n"
            f"{_FRAMES}torch.multiprocessing.spawn.ProcessRaisedException: it failed",
            "KeyError: 'text'",
        ),
        (f"{_FRAMES}ValueError: keys [1] of rank 3", "ValueError: keys [1] of rank 3"),
        (
            "".join(
                f"[trainer] 2026-05-23T16:49:12.29Z {line}\n"
                for line in f"{_FRAMES}KeyError: 'text'".splitlines()
            ),
            "KeyError: 'text'",
        ),
    ],
    ids=[
        "torchrun",
        "JSON",
        "repr",
        "Empty",
        "StopIteration",
        "any name",
        "group",
        "reported",
        "a rank in it",
        "a container's name",
    ],
)
def test_error_is_read_however_its_traceback_is_written(text: str, line: str) -> None:
    found = explain(f"{text}\n")
    assert found is not None
    assert (found.known.name, found.line.text.strip().split('"')[0]) == ("own-error", line)
    assert found.frame == "/srv/train.py:33 in main"


def test_actor_of_an_older_ray_has_a_prefix() -> None:
    text = RAISED_BY_A_PACKAGE.format(file="ray/rllib/trainer.py", error="KeyError: 'v'")
    found = explain("".join(f"(pid=77) {line}\n" for line in f"{text}train.py".splitlines()))
    assert found is not None and found.line.text == "KeyError: 'v'"


def test_lines_that_a_platform_marks_as_errors_are_the_program_s_own() -> None:
    lines = ("Traceback (most recent call last):", '  File "/job/train.py", line 7, in main')
    marked = "\n".join(
        f"2026-05-21 09:28:21.116 [ERROR] {line}"
        for line in (*lines, "AssertionError: no rank")
    )
    found = explain(f"{marked}\n")
    assert found is not None
    assert (found.known.name, found.line.text) == ("own-error", "AssertionError: no rank")


def test_port_of_nccl_s_own_reports_is_needed_by_no_training() -> None:
    line = "n9:12:14 [1] {}:160 NCCL WARN Call to bind failed: Address already in use\n"
    assert explain(line.format("ras/client_support.cc")) is None
    found = explain(line.format("misc/socket.cc"))
    assert found is not None and found.known.name == "address-in-use"


@pytest.mark.parametrize(
    "line",
    [
        "OSError: Forbidden: b/star/o/selected_train.csv: no storage.objects.get access",
        "ERROR: tablespace 'fast' must be on the same device as the base directory",
        "mv: cannot move '/srv/a': source and target must be on the same device",
        "FlinkException: Failed to resume from checkpoint 412",
        "conda: PackageNotFoundError: Packages missing in current channels: - libfoo",
        "pkg_resources.VersionConflict: (click 7.0, Requirement.parse('click>=8'))",
        "ImportError: cannot import name 'Celery' from 'celery' (/srv/app/celery.py)",
        "AttributeError: module 'django.contrib.auth' has no attribute 'views'",
        "openpyxl: ValueError: Expected dtype object, got int64",
        "ValueError: operands could not be broadcast together with shapes (3,) (4,)",
        "terraform: Error: batch size must be divisible by 4",
        "ffmpeg: Error: channels 3 does not match 2",
        "Installer: this step requires you to execute setup.sh as root",
        "[Game] Error: Engine core initialization failed, see player.log",
        "PIL.UnidentifiedImageError: cannot identify image file 'a.jpg'",
        "Fatal Python error: init_import_site: Failed to import the site module",
        "ollama[87]: Error: llama runner process has terminated: CUDA error: out of memory",
        "No module named 'gguf'\nCannot import C:/nodes/gguf module for custom nodes\npytorch: 2.3",
    ],
)
def test_line_of_another_program_is_unknown(line: str) -> None:
    assert explain(f"{line}\n") is None


@pytest.mark.parametrize(
    "line",
    [
        "lmdeploy serve api_server /m --backend pytorch",
        "Running on local URL:  http://127.0.0.1:7860",
        "(ServeReplica:default:LLM pid=99) loading with vllm",
        "2024-05-01T10:00:30.000Z ERROR text_generation_launcher: torch, rank=0",
        "==== FAILURES ==== test_torch.distributed",
        "Step 8/12 : RUN pip install torch",
    ],
)
def test_server_of_models_and_report_of_tests_are_no_training(line: str) -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert explain(f"{line}\n{error}\n") is None
    assert explain(of_rank(f"{line}\n{RAISED_BY_A_PACKAGE}\n")) is None
    assert explain(f"torchrun train.py --backend pytorch\n{error}\n") is not None


def test_server_of_models_within_training_is_of_the_training() -> None:
    error = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    assert explain(f"server_args=ServerArgs(model_path='m')\n{error}\n") is None
    assert (
        explain(f"GRPO step 1\nserver_args=ServerArgs(model_path='m')\n{error}\n") is not None
    )


def test_error_without_its_traceback_is_the_programs_unless_training_goes_on() -> None:
    log = "torchrun train.py\nstep 1 loss 2.0\nKeyError: 'x'\n"
    found = explain(log)
    assert found is not None and found.known.name == "own-error"
    for after in ("step 2 loss 1.9", "epoch 1: 10%|# | 1/10 [00:01<00:09, 1.0s/it]"):
        assert explain(f"{log}{after}\n") is None


def test_machine_taken_away_is_told_and_a_request_that_waits_is_no_failure() -> None:
    training = "torchrun --nproc_per_node 8 train.py\nstep 10 loss 2.31"
    for line in (
        "Host EC2 (instance i-0abc) terminated.",
        "Warning  Preempted  3m  kueue-admission  Preempted to accommodate a higher priority Workload",
    ):
        found = explain(f"{training}\n{line}\n")
        assert found is not None and found.known.name == "preempted"
        assert explain(f"{line}\n") is None
    waits = "WARNING scheduler.py:1057] Sequence group 12 is preempted by PreemptionMode.RECOMPUTE mode."
    assert explain(f"{training}\n{waits}\n") is None
