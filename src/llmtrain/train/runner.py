"""Start DeepSpeed's own runner (the ``deepspeed`` command) with a stand-in for the hosts' interpreter.

DeepSpeed writes ``sys.executable`` of the head into the command it sends to every host. Here that is a script in
the run folder, one path on all hosts; see :func:`llmtrain.launch.prepare.render_stand_in`.
"""

from __future__ import annotations

import sys


def main() -> None:
    """``STAND_IN RUNNER_ARGS...``."""
    from deepspeed.launcher import runner

    sys.executable = sys.argv.pop(1)
    runner.main()


if __name__ == "__main__":
    main()
