"""The memory of the host."""

from meshwright.runtime.host_machine import host_memory


def test_host_memory_is_read_with_a_containers_limit(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2048 kB\nMemAvailable:  1024 kB\n")
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("max\n")
    unlimited = {
        "host_total_bytes": 2048 * 1024,
        "host_available_bytes": 1024 * 1024,
        "container_limit_bytes": None,
    }
    assert host_memory(tmp_path) == unlimited
    (cgroup / "memory.max").write_text("1000\n")
    assert host_memory(tmp_path) == unlimited | {"container_limit_bytes": 1000}
    assert set(host_memory(tmp_path / "nowhere").values()) == {None}
