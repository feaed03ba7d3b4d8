#!/usr/bin/python3
"""Run the shell scripts that come over the virtual machine's serial port, one JSON line each, and answer."""

import glob
import json
import subprocess
import time

PORT = "/dev/vport[0-9]*p1"  # the kernel counts virtual devices of all kinds


def run(script: str, limit_s: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return 124, (expired.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def main() -> None:
    while not (ports := glob.glob(PORT)):
        time.sleep(0.2)
    with open(ports[0], "r+b", buffering=0) as port:
        port.write(json.dumps({"ready": time.monotonic()}).encode() + b"\n")
        pending = b""
        while True:
            data = port.read(65536)
            if not data:  # nobody is at the other end
                time.sleep(0.2)
                continue
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                status, output = run(asked["script"], asked["limit_s"])
                answer = json.dumps({"id": asked["id"], "rc": status, "out": output}).encode() + b"\n"
                while answer:
                    answer = answer[port.write(answer) :]


if __name__ == "__main__":
    main()
