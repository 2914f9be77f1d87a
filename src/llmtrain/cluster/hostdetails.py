"""Runs on a host, after hostfacts: limits, tools, drivers and whatever else may stop a run.

Standard library only, Python 3.6 and later; read as one file together with hostfacts. Nothing is judged here: outputs
of programs travel as text and are read on the head, where cases test the readers.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from typing import Any, Dict, List, Optional

Details = Dict[str, Any]

SHM = "/dev/shm"
SMI = ["nvidia-smi", "-q", "-x"]
TOOLS = ("c++", "g++", "ninja", "nvcc", "pdsh")
NVIDIA_LIBRARIES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def text_of(path: str) -> Optional[str]:
    try:
        with open(path, errors="replace") as stream:
            return stream.read(1 << 20)
    except OSError:
        return None


def output_of(argv: List[str], seconds: float = 20.0) -> Optional[Details]:
    """Exit code and streams of a program; None if there is no such program."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"code": None, "stdout": "", "stderr": "no answer within %d s" % seconds}
    except OSError:
        return None
    return {
        "code": done.returncode,
        "stdout": done.stdout.decode("utf-8", "replace"),
        "stderr": done.stderr.decode("utf-8", "replace"),
    }


def smi() -> Optional[Details]:
    """All about the GPUs in one answer, without the long tables of possible clocks."""
    answer = output_of(SMI)
    if answer:
        answer["stdout"] = re.sub(r"(?s)<supported_clocks>.*?</supported_clocks>", "", answer["stdout"])
    return answer


def owners(text: str) -> Dict[str, Details]:
    """Who runs the processes that nvidia-smi names."""
    found = {}
    for pid in set(re.findall(r"<pid>(\d+)</pid>", text)):
        found[pid] = {"user": user_of(pid), "run": run_of(pid)}
    return found


def user_of(pid: str) -> Optional[str]:
    import pwd

    try:
        uid = os.stat("/proc/" + pid).st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def run_of(pid: str) -> Optional[str]:
    match = re.search("(?:^|\0)LLMTRAIN_RUN_ID=([^\0]+)", text_of("/proc/%s/environ" % pid) or "")
    return match.group(1) if match else None


def limits() -> Dict[str, int]:
    """Soft limits; -1 where there is none."""
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    return {name: resource.getrlimit(number)[0] for name, number in names.items()}


def mount_of(path: str) -> Details:
    """Type and options of the file system where a path is or would be."""
    real = os.path.realpath(path)
    best, found = "", {"type": "", "options": ""}
    for line in (text_of("/proc/self/mounts") or "").splitlines():
        fields = line.split()
        place = fields[1].replace("\\040", " ") if len(fields) > 3 else ""
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if place and inside and len(place) >= len(best):
            best, found = place, {"type": fields[2], "options": fields[3]}
    return found


def torch_build() -> Details:
    """What torch was built for, without the seconds that importing it takes."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
    cuda = re.search(r"^cuda\b[^=]*= *'([^']+)'", text_of(folder + "/version.py") or "", re.MULTILINE)
    return {"cuda": cuda.group(1) if cuda else None, "nccl": nccl_version()}


def nccl_version() -> Optional[str]:
    try:
        from importlib.metadata import PackageNotFoundError, version
    except ImportError:
        return None
    for name in NVIDIA_LIBRARIES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def built_ops(node_dir: str) -> List[str]:
    """``VERSIONS/OP`` of every operation that has been compiled in the working folder."""
    base = os.path.join(node_dir, "ops")
    found = []
    for versions in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        folder = os.path.join(base, versions)
        for op in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            found += [versions + "/" + op] if os.path.exists(os.path.join(folder, op, op + ".so")) else []
    return found


def shipped_ops() -> List[str]:
    """Operations that were compiled when DeepSpeed was installed."""
    from importlib.util import find_spec

    try:
        spec = find_spec("deepspeed")
    except (ImportError, ValueError):
        spec = None
    folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
    return re.findall(r"'(\w+)': True", text_of(folder + "/git_version_info_installed.py") or "")


def tools() -> Dict[str, Optional[str]]:
    """Programs the ranks would find: beside the interpreter first, then in the login's PATH."""
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", os.defpath)
    found = {name: shutil.which(name, path=path) for name in TOOLS}
    cxx = os.environ.get("CXX")
    found["c++"] = shutil.which(cxx.split()[0], path=path) if cxx else found["c++"]
    if found["nvcc"] is None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        found["nvcc"] = shutil.which("nvcc", path=home + "/bin")
    return found


def infiniband() -> List[Dict[str, str]]:
    """One entry per port of a host channel adapter."""
    base, found = "/sys/class/infiniband", []
    for device in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        ports = os.path.join(base, device, "ports")
        for port in sorted(os.listdir(ports)) if os.path.isdir(ports) else ():
            entry = {"device": device, "port": port}
            for name in ("state", "phys_state", "rate", "link_layer"):
                entry[name] = (text_of(os.path.join(ports, port, name)) or "").strip()
            found.append(entry)
    return found


def has_process(name: str) -> bool:
    for pid in os.listdir("/proc"):
        if pid.isdigit() and (text_of("/proc/%s/comm" % pid) or "").strip() == name[:15]:
            return True
    return False


def xids() -> List[str]:
    """The driver's complaints in the kernel log, where the login may read it."""
    answer = output_of(["dmesg"], 5.0) if os.path.exists("/proc/driver/nvidia") else None
    return [line for line in (answer or {"stdout": ""})["stdout"].splitlines() if "NVRM: Xid" in line][-20:]


def details(request: Details) -> Details:
    home = os.path.expanduser("~")
    node_dir = request.get("node_dir") or os.path.join(home, ".llmtrain")
    gpus = smi()
    found = tools()
    shm = os.statvfs(SHM) if os.path.isdir(SHM) else None
    return {
        "kernel": platform.release(),
        "user": user_of("self"),
        "limits": limits(),
        "shm_total_bytes": shm.f_blocks * shm.f_frsize if shm else 0,
        "shm_free_bytes": shm.f_bavail * shm.f_frsize if shm else 0,
        "node_mount": mount_of(node_dir),
        "home_mount": mount_of(home),
        "tools": found,
        "nvcc": output_of([found["nvcc"], "--version"]) if found["nvcc"] else None,
        "python_header": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
        "torch": torch_build(),
        "built_ops": built_ops(node_dir),
        "shipped_ops": shipped_ops(),
        "smi": gpus,
        "owners": owners(gpus["stdout"]) if gpus else {},
        "driver_loaded": os.path.exists("/proc/driver/nvidia/version"),
        "xids": xids(),
        "infiniband": infiniband(),
        "peermem": bool(re.search(r"(?m)^(nvidia_peermem|nv_peer_mem) ", text_of("/proc/modules") or "")),
        "nvswitch": os.path.exists("/dev/nvidia-nvswitch0"),
        "fabricmanager": has_process("nv-fabricmanager"),
        "path": os.environ.get("PATH", ""),
    }
