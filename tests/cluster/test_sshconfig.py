from __future__ import annotations

import subprocess

import pytest

from llmtrain.cluster.sshconfig import make_target, parse_ssh_g, render_ssh_config


def _target(text):
    return make_target("gpu004", parse_ssh_g("gpu004", text))


def test_plain_host():
    """Without settings of the user's, the name is the address and the key is stored under it."""
    target = _target("hostname gpu004\nport 22\nuser me\nproxyjump none\n")
    assert (target.address, target.port, target.user, target.key_name, target.proxy) == (
        "gpu004",
        22,
        "me",
        "gpu004",
        None,
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hostname 10.0.0.4\nport 2222\n", "[10.0.0.4]:2222"),
        ("hostname 10.0.0.4\nport 2222\nhostkeyalias rack\n", "rack"),
        ("hostname 10.0.0.4\nhostkeyalias none\n", "10.0.0.4"),
    ],
)
def test_key_name(text, name):
    """The host key is looked up under the name OpenSSH stores it under."""
    assert _target(text).key_name == name


@pytest.mark.parametrize(
    ("jump", "tail"),
    [
        ("bastion", ["--", "bastion"]),
        ("me@bastion:2200", ["--", "ssh://me@bastion:2200"]),
        ("first,second", ["-J", "first", "-W", "[10.0.0.4]:22", "--", "second"]),
    ],
)
def test_jump_hosts_go_through_openssh(jump, tail):
    """A jump host is left to an OpenSSH child whose streams are the connection."""
    proxy = list(_target(f"hostname 10.0.0.4\nproxyjump {jump}\n").proxy or ())
    assert proxy[-len(tail) :] == tail
    assert "StrictHostKeyChecking=yes" in proxy


def test_proxy_command_is_expanded():
    """The tokens of a ProxyCommand are filled in."""
    proxy = _target("hostname 10.0.0.4\nport 2222\nuser me\nproxycommand nc -x p %h %p %r %n 100%%\n").proxy or ()
    assert proxy[-1] == "exec nc -x p 10.0.0.4 2222 me gpu004 100%"


def test_only_existing_files_count(tmp_path):
    """Key files and host-key files that do not exist are left out."""
    key = tmp_path / "id"
    key.write_text("x")
    target = _target(
        f"hostname h\nidentityfile {key}\nidentityfile /absent/id\nuserknownhostsfile {key} /absent/known\n"
    )
    assert target.identity_files == (str(key),)
    assert target.known_hosts == (str(key),)


def test_identity_agent_none():
    """IdentityAgent none turns the agent off."""
    assert not _target("hostname h\nidentityagent none\n").use_agent
    assert _target("hostname h\n").use_agent


def test_pdsh_gets_our_options_over_the_users_own(tmp_path):
    """The real ssh reads the rendered configuration: ours wins, and what the user set besides still holds."""
    home = tmp_path / ".ssh"
    home.mkdir()
    (home / "config").write_text(
        "Host gpu004\n  HostName 192.0.2.4\n  Port 2222\n  User me\n  StrictHostKeyChecking no\n  ForwardAgent yes\n"
    )
    ours = tmp_path / "ours"
    # ssh takes the home folder from the password file, so the include is pointed at the test's own.
    ours.write_text(render_ssh_config().replace("~/.ssh/config", str(home / "config")))
    done = subprocess.run(["ssh", "-F", str(ours), "-G", "--", "gpu004"], capture_output=True, text=True, check=True)
    settings = parse_ssh_g("gpu004", done.stdout)
    assert settings["hostname"] == ["192.0.2.4"]
    assert settings["port"] == ["2222"]
    assert settings["user"] == ["me"]
    assert settings["stricthostkeychecking"] in (["true"], ["yes"])
    assert settings["batchmode"] == ["yes"]
    assert settings["forwardagent"] == ["no"]
