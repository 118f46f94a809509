#!/usr/bin/env python3
"""A fleet of real processes that die, freeze and run out of disk: no accepted job may be lost, stuck or done twice.

    tools/fleet/chaos.py --kiln target/release/kiln --nats nats-server --nodes 3 --seed 1

Starts a cluster of nats-servers, gateways and workers on loopback, submits jobs (half of them with an Idempotency-Key,
all with a webhook) and meanwhile injects faults in an order that the seed decides. When the faults are over, every
accepted job must end within the time allowed, with exactly one image or by a rule, and every webhook must have been called.
Ends with a line of JSON; exit code 1 if something was lost. Needs Linux and Python 3.9; a full disk needs the right to mount.
"""

import argparse
import base64
import collections
import http.client
import http.server
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ENDED = {"done", "failed", "cancelled"}
# What a job may fail by: it broke workers, or was tried too often. Anything else is a fault of the fleet.
RULES = {"worker_lost", "dead_letter", "crashed", "interrupted"}
SECRET = "whsec_" + base64.b64encode(b"chaos chaos chaos chaos").decode()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Process:
    """A program that is started again with the same arguments."""

    def __init__(self, name, command, folder, env=None):
        self.name, self.command, self.folder, self.env = name, command, folder, env
        self.log = open(folder / f"{name}.log", "ab")
        self.start()

    def start(self):
        self.child = subprocess.Popen(self.command, stdout=self.log, stderr=self.log, env=self.env, cwd=self.folder)

    def kill(self):
        self.child.send_signal(signal.SIGCONT)
        self.child.kill()
        self.child.wait()

    def restart(self):
        if self.child.poll() is None:
            self.kill()
        self.start()

    def revive(self):
        """Starts the program again if it ended by itself, as systemd would."""
        if self.child.poll() is not None:
            self.log.write(f"--- ended with {self.child.returncode}, started again\n".encode())
            self.start()
            return True
        return False

    def freeze(self, seconds):
        self.child.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.child.send_signal(signal.SIGCONT)


class Disk:
    """The folder of a nats-server on a file system of its own, which can be filled."""

    def __init__(self, folder, size):
        self.folder, self.size, self.mounted = folder, size, False
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder)]
        self.mounted = subprocess.run(mount, capture_output=True).returncode == 0

    def fill(self):
        with open(self.folder / "filler", "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass

    def free(self):
        (self.folder / "filler").unlink(missing_ok=True)

    def close(self):
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], capture_output=True)


class Webhooks(http.server.ThreadingHTTPServer):
    """Counts the calls for each job."""

    daemon_threads = True

    def __init__(self):
        self.calls, self.lock = collections.Counter(), threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, address):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.calls[body["data"]["id"]] += 1
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def nats_request(port, subject, payload=b"{}", timeout=3):
    """One request and its answer, in NATS' own protocol."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as link:
        link.settimeout(timeout)
        file = link.makefile("rb")
        file.readline()
        inbox = f"_INBOX.chaos{random.getrandbits(64):x}"
        options = json.dumps({"verbose": False, "pedantic": False, "headers": True, "no_responders": True})
        link.sendall(f"CONNECT {options}\r\nSUB {inbox} 1\r\nPUB {subject} {inbox} {len(payload)}\r\n".encode())
        link.sendall(payload + b"\r\n")
        while True:
            line = file.readline()
            if line.startswith(b"PING"):
                link.sendall(b"PONG\r\n")
            elif line.startswith((b"MSG", b"HMSG")):
                return file.read(int(line.split()[-1]))
            elif not line:
                raise OSError("the connection was closed")


class Fleet:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.webhooks = Webhooks()
        ports = free_ports(3 * args.nodes + args.gateways)
        clients, routes, monitors = (ports[n * args.nodes : (n + 1) * args.nodes] for n in range(3))
        self.client_ports, self.monitor_ports = clients, monitors
        self.disks = [Disk(folder / f"queue-{n}", args.disk) for n in range(args.nodes)]
        self.queues = []
        for n in range(args.nodes):
            command = [args.nats, "-a", "127.0.0.1", "-p", str(clients[n]), "-m", str(monitors[n])]
            command += ["-js", "-sd", str(self.disks[n].folder), "-n", f"queue-{n}"]
            if args.nodes > 1:
                others = ",".join(f"nats://127.0.0.1:{port}" for port in routes)
                command += ["--cluster_name", "chaos", "--cluster", f"nats://127.0.0.1:{routes[n]}", "--routes", others]
            self.queues.append(Process(f"queue-{n}", command, folder))
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in clients)
        self.wait_for_queue()
        self.env = dict(os.environ, HOME=str(folder), XDG_CACHE_HOME=str(folder / "cache"), KILN_THREADS="1")
        common = ["--queue", self.url, "--ack-wait", str(args.ack_wait), "--queue-replicas", str(args.nodes)]
        self.ports = ports[3 * args.nodes :]
        self.gateways = [
            Process(
                f"gateway-{n}",
                [args.kiln, "serve", *common, "-p", str(port), "--webhook-secret", SECRET, "--webhook-private", *args.gateway_option],
                folder,
                self.env,
            )
            for n, port in enumerate(self.ports)
        ]
        self.workers = [
            Process(f"worker-{n}", [args.kiln, "worker", *common, *args.worker_option], folder, self.env)
            for n in range(args.workers)
        ]

    def wait_until_ready(self):
        for port in self.ports:
            self.wait(lambda: self.ask(port, "GET", "/readyz")[0] == 200, 60, "the gateway is not ready")
        self.wait(lambda: self.model_is_known(), 60, "no worker is ready")

    def processes(self):
        return self.queues + self.gateways + self.workers

    def model_is_known(self):
        status, models = self.ask(self.ports[0], "GET", "/v1/models")
        return status == 200 and any(model["id"] == "ember" for model in models.get("data", []))

    def revive(self):
        return [process.name for process in self.processes() if process.revive()]

    def wait(self, condition, seconds, message):
        end = time.time() + seconds
        while time.time() < end:
            try:
                if condition():
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(message)

    def wait_for_queue(self):
        """Until JetStream answers."""
        self.wait(lambda: b'"error":' not in nats_request(self.client_ports[0], "$JS.API.INFO", b""), 60, "no queue")

    def ask(self, port, method, path, body=None, headers=None, timeout=20):
        """The status and the JSON of a response; status 0 if there is none."""
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        try:
            headers = dict(headers or {}, **({"content-type": "application/json"} if body else {}))
            link.request(method, path, body, headers)
            response = link.getresponse()
            content = response.read()
            try:
                return response.status, json.loads(content)
            except ValueError:
                return response.status, content
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            link.close()

    def close(self):
        for process in self.processes():
            if process.child.poll() is None:
                process.kill()
        for disk in self.disks:
            disk.close()
        self.webhooks.shutdown()


class Client(threading.Thread):
    """Submits jobs one after another, each until a gateway accepts it."""

    def __init__(self, fleet, numbers, accepted, refused):
        super().__init__(daemon=True)
        self.fleet, self.numbers, self.accepted, self.refused = fleet, numbers, accepted, refused

    def run(self):
        fleet = self.fleet
        random_pause = random.Random(threading.get_ident())
        while True:
            try:
                number = self.numbers.popleft()
            except IndexError:
                return
            body = {"prompt": "a red apple", "seed": number, "width": 64, "height": 64, "steps": fleet.args.steps}
            body["webhook"] = f"http://127.0.0.1:{fleet.webhooks.server_address[1]}/"
            headers = {"idempotency-key": f"key-{number}"} if fleet.args.keyed == "all" or number % 2 else {}
            tries = 0
            while True:
                port = fleet.ports[(number + tries) % len(fleet.ports)]
                tries += 1
                status, answer = fleet.ask(port, "POST", "/v1/jobs", json.dumps(body), headers)
                if status in (200, 202):
                    self.accepted[answer["id"]] = number
                    break
                if 400 <= status < 500 and status != 429:
                    self.refused.append((number, status, answer))
                    break
                time.sleep(0.2)
            time.sleep(random_pause.uniform(0, fleet.args.pause))


def leader_of(fleet, stream):
    """The number of the node that leads a stream; 0 if nobody tells."""
    for port in fleet.client_ports:
        try:
            info = json.loads(nats_request(port, f"$JS.API.STREAM.INFO.{stream}", b""))
            return int(info["cluster"]["leader"].rsplit("-", 1)[1])
        except (OSError, ValueError, KeyError, AttributeError):
            continue
    return 0


def inject(fleet, event, chance):
    """One fault, which is over when this returns."""
    args = fleet.args
    if event == "kill worker":
        worker = chance.choice(fleet.workers)
        worker.kill()
        time.sleep(chance.uniform(0, 1))
        worker.restart()
    elif event == "kill gateway":
        gateway = chance.choice(fleet.gateways)
        gateway.kill()
        time.sleep(chance.uniform(0, 1))
        gateway.restart()
    elif event == "kill queue node":
        queue = chance.choice(fleet.queues)
        queue.kill()
        time.sleep(chance.uniform(0, 4))
        queue.restart()
    elif event == "kill leader":
        queue = fleet.queues[leader_of(fleet, chance.choice(["KILN_JOBS", "KV_KILN_STATE"]))]
        queue.kill()
        time.sleep(chance.uniform(0, 4))
        queue.restart()
    elif event == "kill all queue nodes":
        for queue in fleet.queues:
            queue.kill()
        time.sleep(chance.uniform(0, 2))
        for queue in fleet.queues:
            queue.restart()
    elif event == "freeze worker":
        chance.choice(fleet.workers).freeze(args.ack_wait * chance.uniform(1.2, 2))
    elif event == "freeze gateway":
        chance.choice(fleet.gateways).freeze(args.ack_wait * chance.uniform(1.2, 2))
    elif event == "freeze queue node":
        chance.choice(fleet.queues).freeze(chance.uniform(2, 6))
    elif event in ("full disk", "full disks"):
        disks = fleet.disks if event == "full disks" else [chance.choice(fleet.disks)]
        for disk in disks:
            disk.fill()
        time.sleep(chance.uniform(3, 6))
        for disk in disks:
            disk.free()
        # JetStream stops for good on a node whose disk was full: it is started again, as its health check demands.
        for port, queue in zip(fleet.monitor_ports, fleet.queues):
            status, _ = fleet.ask(port, "GET", "/healthz", timeout=2)
            if status != 200 or args.restart_after_full_disk:
                queue.restart()
                time.sleep(0.5)
    elif event == "delete stream":
        for port in fleet.client_ports:
            try:
                answer = json.loads(nats_request(port, "$JS.API.STREAM.DELETE.KILN_JOBS", b""))
                if answer.get("success"):
                    break
            except (OSError, ValueError):
                continue
    else:
        raise ValueError(event)


def plan_of(args, chance, mounted):
    """Which faults come in which order: each at least once, more by chance."""
    events = ["kill worker", "kill gateway", "kill queue node", "freeze worker", "kill worker", "kill gateway"]
    if args.nodes > 1:
        events += ["kill leader", "kill leader", "freeze queue node", "kill all queue nodes", "kill queue node"]
    events += ["freeze gateway", "delete stream"]
    if mounted:
        events += ["full disk" if chance.random() < 0.5 else "full disks"]
    chance.shuffle(events)
    return events if args.events is None else [event for event in args.events.split(",") if event]


def run(args, folder):
    chance = random.Random(args.seed)
    fleet = Fleet(args, folder)
    started = time.time()
    try:
        fleet.wait_until_ready()
        accepted, refused = {}, []
        numbers = collections.deque(range(1, args.jobs + 1))
        clients = [Client(fleet, numbers, accepted, refused) for _ in range(args.clients)]
        for client in clients:
            client.start()
        events = plan_of(args, chance, all(disk.mounted for disk in fleet.disks))
        for event in events:
            time.sleep(chance.uniform(0.3, 2.5))
            if args.verbose:
                print(f"{time.time() - started:6.1f} s  {event}  ({len(accepted)} accepted)", file=sys.stderr, flush=True)
            inject(fleet, event, chance)
            fleet.revive()
        faults_over = time.time()
        end = faults_over + args.patience
        while any(client.is_alive() for client in clients) and time.time() < end:
            fleet.revive()
            time.sleep(0.2)
        submitted = time.time()
        jobs = wait_for_ends(fleet, accepted, end)
        return report(args, fleet, events, accepted, refused, jobs, numbers, started, faults_over, submitted)
    finally:
        fleet.close()


def wait_for_ends(fleet, accepted, end):
    """The last known state of every job, and the webhooks' time to arrive."""
    jobs = {}
    while time.time() < end:
        for id in list(accepted):
            if jobs.get(id, {}).get("status") not in ENDED:
                status, job = fleet.ask(random.choice(fleet.ports), "GET", f"/v1/jobs/{id}")
                if status == 200:
                    jobs[id] = job
                elif status == 404:
                    jobs[id] = {"status": "404"}
        waiting = [id for id in accepted if jobs.get(id, {}).get("status") not in ENDED]
        if not waiting and all(fleet.webhooks.calls[id] for id in accepted):
            break
        fleet.revive()
        time.sleep(0.3)
    return jobs


def report(args, fleet, events, accepted, refused, jobs, numbers, started, faults_over, submitted):
    states = collections.Counter(jobs.get(id, {}).get("status", "unknown") for id in accepted)
    stuck = [id for id in accepted if jobs.get(id, {}).get("status") not in ENDED]
    failed = {id: jobs[id].get("error", {}) for id in accepted if jobs.get(id, {}).get("status") == "failed"}
    wrong = []
    for id, number in accepted.items():
        job = jobs.get(id, {})
        if job.get("status") == "done":
            images = job.get("images", [])
            if len(images) != 1 or str(images[0]["seed"]) != str(number):
                wrong.append((id, "images", images))
                continue
            status = 0
            for port in fleet.ports:
                status, _ = fleet.ask(port, "GET", f"/v1/images/{images[0]['id']}/file")
                if status == 200:
                    break
            if status != 200:
                wrong.append((id, "file", status))
    keyed = [number for number in accepted.values() if args.keyed == "all" or number % 2]
    doubled = len(set(keyed)) != len(keyed)
    silent = [id for id in accepted if id not in stuck and not fleet.webhooks.calls[id]]
    unexpected = {id: error for id, error in failed.items() if error.get("code") not in RULES}
    unexpected |= {id: "cancelled by nobody" for id in accepted if jobs.get(id, {}).get("status") == "cancelled"}
    end = time.time() + 30
    while (ready := [fleet.ask(port, "GET", "/readyz")[0] for port in fleet.ports]) != [200] * len(fleet.ports):
        if time.time() > end:
            break
        time.sleep(0.5)
    result = {
        "seed": args.seed,
        "nodes": args.nodes,
        "accepted": len(accepted),
        "not_accepted": args.jobs - len(accepted) - len(refused),
        "refused": refused,
        "states": dict(states),
        "stuck": stuck,
        "failed": failed,
        "unexpected": unexpected,
        "wrong": wrong,
        "webhooks_missing": silent,
        "webhooks_repeated": sum(count - 1 for count in fleet.webhooks.calls.values()),
        "keys_doubled": doubled,
        "ready": ready,
        "events": events,
        "seconds": round(time.time() - started, 1),
        "seconds_after_faults": round(time.time() - faults_over, 1),
    }
    lost = stuck or wrong or silent or doubled or unexpected or refused or result["not_accepted"] or set(ready) != {200}
    result["ok"] = not lost
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", required=True)
    parser.add_argument("--nats", default="nats-server")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=120)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--ack-wait", type=int, default=5)
    parser.add_argument("--keyed", choices=["half", "all"], default="half", help="jobs that have an Idempotency-Key")
    parser.add_argument("--pause", type=float, default=3.0, help="longest pause of a client between two jobs, in seconds")
    parser.add_argument("--patience", type=float, default=120, help="seconds that jobs may take after the last fault")
    parser.add_argument("--disk", type=int, default=256, help="size of each nats-server's file system, in MiB")
    parser.add_argument("--events", help="these faults, separated by commas, instead of chosen ones; '' for none")
    parser.add_argument("--restart-after-full-disk", action="store_true")
    parser.add_argument("--gateway-option", action="append", default=[])
    parser.add_argument("--worker-option", action="append", default=[])
    parser.add_argument("--keep", help="keep logs and data in this folder")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    args.kiln = shutil.which(args.kiln) and str(Path(shutil.which(args.kiln)).resolve())
    folder = Path(args.keep or tempfile.mkdtemp(prefix="kiln-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    result = run(args, folder)
    if result["ok"] and not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        result["logs"] = str(folder)
    for name in ("stuck", "webhooks_missing"):
        result[name] = {"count": len(result[name]), "first": result[name][:5]}
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
