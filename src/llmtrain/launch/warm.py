"""Compile DeepSpeed's operations on the hosts before ranks need them, into the cache that a launch uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cluster.checks.build import unbuilt_ops
from llmtrain.cluster.fleet import Command, Fleet, run_on_all
from llmtrain.cluster.probes import ops_folder
from llmtrain.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.fleet import HostResults
    from llmtrain.cluster.needs import Needs
    from llmtrain.cluster.probes import Facts

BUILD_S = 1200.0
BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "async_io": "AsyncIOBuilder",
    "fused_adam": "FusedAdamBuilder",
}
"""Operation -> DeepSpeed's name of what builds it."""
_BUILD = (
    "import sys; from deepspeed.accelerator import get_accelerator as accelerator\n"
    "for name in sys.argv[1:]: accelerator().create_op_builder(name).load(verbose=False)\n"
)
# $1 is put first in PATH: ninja lies beside the interpreter, where a login does not look.
_WITH_PATH = 'PATH="$1:$PATH"; export PATH; shift; exec "$@"'


def cold_hosts(facts: Mapping[str, Facts], needs: Needs) -> dict[str, list[str]]:
    """Host -> operations that are not built there."""
    found = {name: unbuilt_ops(item, needs.ops) for name, item in facts.items()}
    return {name: ops for name, ops in found.items() if ops}


def warm_hosts(fleet: Fleet, facts: Mapping[str, Facts], cold: Mapping[str, Sequence[str]], *, cuda: bool) -> None:
    """Build on all hosts at once.

    Raises:
        HostFailuresError: a build failed somewhere; every host's last words are kept.
    """

    def build(name: str) -> None:
        item = facts[name]
        settings = [f"TORCH_EXTENSIONS_DIR={ops_folder(item)}", *([] if cuda else ["DS_ACCELERATOR=cpu"])]
        run = ("env", *settings, item.executable, "-I", "-c", _BUILD, *(BUILDERS[op] for op in cold[name]))
        folder = item.executable.rpartition("/")[0]
        result = fleet[name].run(Command(argv=("/bin/sh", "-c", _WITH_PATH, "sh", folder, *run), timeout_s=BUILD_S))
        if result.code != 0:
            raise HostError(
                f"{', '.join(cold[name])} could not be built: {result.tail()}",
                where=name,
                fix=f"ssh -- {name} 'c++ --version; ninja --version'",
            )

    results: HostResults[None] = run_on_all(list(cold), build)
    results.all_good()
