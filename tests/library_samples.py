"""What JAX's coordination service prints about processes that are gone, captured with jax 0.10."""

CRASH = """\
W1115 05:35:24.071630    4137 preemption_sync_manager.cc:147] Failed to retrieve preemption notice
Additional GRPC error information from remote target coordination_service while calling /xla:
:UNKNOWN:Error received from peer  {grpc_status:14}
E1115 05:35:24.071724    4137 coordination_service_agent.cc:289] Polled an error
F1115 05:35:24.071730    4137 client.h:80] Terminating process because the JAX distributed \
service detected fatal errors. This most likely indicates that another task died; see the others
*** Check failure stack trace: ***
    @     0xffff945b4d50  absl::lts_20260107::log_internal::LogMessage::SendToLog()
"""
"""A process whose peer was killed."""

_UNHEALTHY = """\
UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
1, 3
The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. \
preemption, eviction) to debug further.

"""
LOST_TASKS = (
    "E1118 00:32:54.648150    2537 coordination_service.cc:1549] [13280370164591377299] Use error "
    f"polling to propagate the following error to all tasks: {_UNHEALTHY}"
    "E1118 00:32:54.648568    2548 coordination_service_agent.cc:289] Polled an error from "
    "coordination service (this can be an error from this or another task).\n"
    "F1118 00:32:54.648763    2548 client.h:80] Terminating process because the JAX distributed "
    f"service detected fatal errors. absl::Status: {_UNHEALTHY}"
    "RPC: /xla.coordination.CoordinationService/PollForError [type.googleapis.com/tensorflow]\n"
    "*** Check failure stack trace: ***\n"
    "    @     0xffff9e854d50  absl::lts_20260107::log_internal::LogMessage::SendToLog()\n"
)
"""Process 0, after two others had been stopped by a signal."""
