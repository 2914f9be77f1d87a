"""Several hosts on one Linux machine: real sshd, real links, real power cuts.

A lab is a ``head`` and ``node1`` .. ``nodeN`` on a private switch. Tests use it through ``tests.lab.fixtures``; a
person uses it as a command:

    python -m tests.lab up 3
    python -m tests.lab exec head env PDSH_RCMD_TYPE=ssh pdsh -w 'node[1-3]' hostname
    python -m tests.lab cut node2
    python -m tests.lab down

How it is built:

* A host is a PID 1 (``node.py``) in its own net, mount, uts, ipc and pid namespaces. The pid namespace is a must:
  DeepSpeed's ``pkill -f`` would otherwise reach every process of the machine. Killing PID 1 ends every process of the
  host and drops its mounts and links: that is a power cut.
* Its root is a directory of its own, so ``/root /home /tmp /srv /mnt /var`` are private and kept over a power cut.
  ``/usr``, ``/opt`` and the shared paths are bound read-only, ``/etc`` is copy-on-write; ``/dev``, ``/run`` and
  ``/dev/shm`` are made fresh at each boot. Nothing else of the machine is visible. Machine id, boot id, host key and
  ``/sys/class/net`` are the host's own. Only the head has the client key.
* The switch is a bridge in a network namespace of its own. Cables are born there with the far end inside the host, so
  nothing ever exists in the machine's network namespace or in ``/run/netns``, and two labs may use the same addresses.
* Faults are desired state in ``faults.json``; ``net.Wires`` brings the cables to that state. So a cut cable is still
  cut after a reboot, another process can heal it, and ``reset`` knows what to undo. Losses and cuts between two hosts
  are nftables rules on the switch's ports: netem is not in every kernel, and a drop inside the sender would show there
  as an error.
* Everything lives in one directory ``/var/tmp/llmtrain-lab-*`` that names its owner. Whatever was started is recorded
  by pid, start time and boot id and is ended through a pidfd; nothing is found by name. The next lab removes labs whose
  owner is gone, and hosts switch themselves off after a time to live.

Not possible here: delay and jitter (no netem), a clock per host, a container engine.
"""

from __future__ import annotations

from tests.lab.lab import Lab
from tests.lab.model import CommandFailedError, LabError, LabOptions
from tests.lab.proc import HostProcess, Process

__all__ = ["CommandFailedError", "HostProcess", "Lab", "LabError", "LabOptions", "Process"]
