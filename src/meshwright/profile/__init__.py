"""Where the time of a step goes: a profiler trace, read back and explained."""

from meshwright.profile.profile import CollectiveTime, DeviceTime, Profile
from meshwright.profile.profiler import NoProfiling, Profiler, Profiling
from meshwright.profile.trace_times import read_profile

__all__ = [
    "CollectiveTime", "DeviceTime", "NoProfiling", "Profile", "Profiler", "Profiling",
    "read_profile"
]  # fmt: skip
