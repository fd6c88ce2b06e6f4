"""An API process of `realizar serve --api-processes`: `python -m realizar.cli.api_process MESSAGES CONNECTIONS`.

The arguments are descriptors of sockets to the main process, which starts it. Log lines go to the same stderr.
"""

from __future__ import annotations

import logging
import socket
import sys

from realizar.cli.terminal.log_lines import log_to_stderr
from realizar.ipc.with_parent import leave_signals_to_parent
from realizar.server.processes.main import receive_start, run_api_process


def main() -> int:
    leave_signals_to_parent()
    messages, handing = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    try:
        start, reader = receive_start(messages)
    except EOFError:
        return 1
    log_to_stderr(start.log_level, start.log_format)
    run_api_process(messages, handing, start, reader)
    logging.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
