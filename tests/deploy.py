"""Checks deploy/: renders the Helm chart with the real helm, holds every manifest against the schemas of Kubernetes, starts
a broker with what a pod would get, verifies the unit for systemd, and runs the image's files without Docker.

tests/deploy.py HELM BIN SCRATCH: kubernetes-validate, with its PyYAML, is on PYTHONPATH; systemd-analyze and openssl are on PATH.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import urllib.request

import kubernetes_validate
import yaml

HELM, BIN, SCRATCH = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]) / "deploy"
DEPLOY = pathlib.Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "helm" / "sluicegate"
# The oldest and the newest that the chart is held against.
VERSIONS = ["1.30", "1.37"]
# Kinds of the Prometheus Operator and of KEDA, for which Kubernetes has no schema.
FOREIGN = {"ServiceMonitor", "ScaledObject", "TriggerAuthentication"}
LIMIT = 30
# Of 10, by systemd's own measure; lower is better.
MOST_EXPOSURE = 1.2


def run(*command, fails=False, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, **options)
    if (done.returncode != 0) != fails:
        sys.exit(f"deploy: exit code {done.returncode} of {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout if not fails else done.stdout + done.stderr


def expect(holds, message):
    if not holds:
        sys.exit(f"deploy: {message}")


# --- the chart ---


def values_file(values):
    path = SCRATCH / "values.json"
    path.write_text(json.dumps(values))
    return path


def render(values):
    path = values_file(values)
    run(HELM, "lint", "--strict", "--quiet", CHART, "--values", path)
    return list(filter(None, yaml.safe_load_all(run(HELM, "template", "try", CHART, "--values", path))))


def refused(values, why):
    said = run(HELM, "template", "try", CHART, "--values", values_file(values), fails=True)
    expect(why in said, f"{values} is refused, but not with '{why}':\n{said}")


def validate(manifests):
    for manifest in manifests:
        for version in VERSIONS:
            if manifest["kind"] not in FOREIGN:
                try:
                    kubernetes_validate.validate(manifest, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    sys.exit(f"deploy: {manifest['kind']} against Kubernetes {version}: {error}\n{yaml.dump(manifest)}")


def of_kind(manifests, *kinds):
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def check_references(manifests):
    """Everything that is named in a manifest is there: labels, ports, volumes, and what is to be scaled."""
    [workload] = of_kind(manifests, "Deployment", "StatefulSet")
    pod = workload["spec"]["template"]
    [container] = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    [service] = of_kind(manifests, "Service")
    selectors = [service["spec"]["selector"], workload["spec"]["selector"]["matchLabels"]]
    selectors += [budget["spec"]["selector"]["matchLabels"] for budget in of_kind(manifests, "PodDisruptionBudget")]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind(manifests, "NetworkPolicy")]
    for selector in selectors:
        expect(selector.items() <= labels, f"{selector} selects none of the pods")
    for port in service["spec"]["ports"]:
        expect(port["port"] == ports.get(port["targetPort"]), f"no such port in the pod: {port}")
    for policy in of_kind(manifests, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            expect(rule.get("from"), f"a rule lets everyone in: {rule}")
            expect(all(port["port"] in ports for port in rule["ports"]), f"no such port in the pod: {rule}")
    for monitor in of_kind(manifests, "ServiceMonitor"):
        service_labels = service["metadata"]["labels"]
        expect(monitor["spec"]["selector"]["matchLabels"].items() <= service_labels.items(), "it selects no Service")
        expect(service_labels.get(monitor["spec"]["jobLabel"]) == "sluicegate", "the job has another name than the alert rules expect")
        expect(all(end["port"] in ports for end in monitor["spec"]["endpoints"]), "no such port in the Service")
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        expect((target["kind"], target["name"]) == (workload["kind"], workload["metadata"]["name"]), f"nothing to scale: {target}")
        expect("replicas" not in workload["spec"], "the Deployment undoes what the autoscaler does")


def fill_volumes(manifests, others, root):
    """Lays the volumes of the pod out under root, as a node does, and returns the broker's settings with their paths there."""
    [workload] = of_kind(manifests, "Deployment", "StatefulSet")
    pod = workload["spec"]["template"]["spec"]
    [container] = pod["containers"]
    made = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
    for mount in container["volumeMounts"]:
        folder = root / mount["mountPath"].lstrip("/")
        folder.mkdir(parents=True)
        if mount["name"] in claims:
            continue
        volume = volumes.pop(mount["name"])
        if "configMap" in volume:
            content = made["ConfigMap", volume["configMap"]["name"]]["data"]
        else:
            name = volume["secret"]["secretName"]
            content = made["Secret", name]["stringData"] if ("Secret", name) in made else others[name]
        for key, text in content.items():
            (folder / key).write_text(text)
    expect(not volumes, f"not mounted anywhere: {volumes}")
    settings = root / container["args"][-1].lstrip("/")
    text = settings.read_text()
    for path in re.findall(r'"(?:sqlite:)?(/[^"]*)"', text):
        expect((root / path.lstrip("/")).parent.exists(), f"no volume is mounted at {path}")
    listens = tomllib.loads(text)
    for setting, name in [("listen", "grpc"), ("http_listen", "http")]:
        port = next(port["containerPort"] for port in container["ports"] if port["name"] == name)
        expect(listens[setting] == f"0.0.0.0:{port}", f"{setting} is not what the Service offers")
    settings.write_text(re.sub(r'"((?:sqlite:)?)/', rf'"\g<1>{root}/', text))
    return settings, [container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")]


@contextlib.contextmanager
def running(command, what, **options):
    """Runs a broker and yields what it says until it serves. One that does not start or end in time is killed and fails the check."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    said = []
    too_late = threading.Timer(LIMIT, process.kill)  # ends its output
    too_late.start()
    try:
        while not (said and "listening on http://" in said[-1]):
            said.append(process.stdout.readline())
            expect(said[-1], f"the broker does not start {what}\n{''.join(said)}")
        too_late.cancel()
        yield "".join(said)
        process.terminate()
        try:
            process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            rest, _ = process.communicate()
            sys.exit(f"deploy: the broker does not end within {LIMIT} s of SIGTERM {what}\n{''.join(said)}{rest}")
    finally:
        too_late.cancel()
        process.kill()  # does nothing to one that has ended
        process.wait()


@contextlib.contextmanager
def broker(settings, cwd, **variables):
    """Runs a broker with these settings, on free ports: flags come before the file. Yields its two addresses."""
    command = [BIN / "sluicegate", "--config", settings, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    with running(command, f"with {settings.read_text()}", cwd=cwd, env=os.environ | variables) as said:
        yield re.findall(r"listening on \w+://(\S+)", said)


def start_with(name, values, manifests, others):
    root = SCRATCH / name
    settings, probes = fill_volumes(manifests, others, root)
    with broker(settings, root) as (grpc, http):
        for path in probes:
            with urllib.request.urlopen(f"http://{http}{path}", timeout=LIMIT) as answer:
                expect(answer.status == 200, f"{path}: {answer.status}")
        tls = values.get("tls", {}).get("enabled", True)
        push = [BIN / "sluice", "--server", f"{'https' if tls else 'http'}://{grpc}"] + (["--ca", SCRATCH / "ca.crt"] if tls else [])
        if values.get("insecure"):
            run(*push, "push", "q", "text")
        else:
            run(*push, "--token-file", SCRATCH / "admin-token", "push", "q", "text")
            expect("a token is needed" in run(*push, "push", "q", "text", fails=True), "everyone is let in")
    if values["store"]["kind"] == "sqlite":
        expect(list(root.glob("var/lib/sluicegate/sluicegate.db")), "the file is not in its volume")


def certificate():
    """Writes ca.crt, tls.crt and tls.key for this machine."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    ca = ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"]
    run("openssl", "req", "-x509", *key, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt", cwd=SCRATCH)
    run("openssl", "req", "-x509", *key, "-subj", "/CN=b", "-addext", "subjectAltName=IP:127.0.0.1", *ca,
        "-keyout", "tls.key", "-out", "tls.crt", cwd=SCRATCH)
    return {name: (SCRATCH / name).read_text() for name in ("tls.crt", "tls.key", "ca.crt")}


def check_chart():
    token = run(BIN / "sluicegate", "token", "new", "admin", "--allow", "admin@*", "--file", "tokens.toml", cwd=SCRATCH)
    (SCRATCH / "admin-token").write_text(token)
    tokens = (SCRATCH / "tokens.toml").read_text()
    # The chart does not ask what the addresses lead to; a broker with them needs no server.
    others = {"tls": certificate(), "mine": {"store": "sqlite::memory:", "signals": "local:"}, "shop": {"tokens.toml": tokens}}
    others["collector"] = {"ca.crt": others["tls"]["ca.crt"]}
    tls = {"existingSecret": "tls"}
    always = {"ConfigMap", "Service", "NetworkPolicy"}
    cases = {
        "mongodb": (
            {"store": {"kind": "mongodb", "mongodb": {"uri": "sqlite::memory:"}}, "tokens": {"file": tokens}, "tls": tls},
            always | {"Deployment", "Secret", "PodDisruptionBudget"},
        ),
        "sqlite": (
            {"store": {"kind": "sqlite", "sqlite": {"storageClass": "fast"}}, "tokens": {"file": tokens}, "tls": tls},
            always | {"StatefulSet", "Secret"},
        ),
        "everything": (
            {
                "store": {"kind": "mongodb", "mongodb": {"existingSecret": "mine", "database": "other"}},
                "signals": {"fromSecret": True}, "tokens": {"existingSecret": "shop"}, "tls": tls,
                "settings": {"max_queues": 20_000_000, "auto_create_queues": True, "default_retry_multiplier": 1.5,
                             "max_payload_bytes": "8MiB", "log_format": "text", "log_level": "warn,audit=info",
                             "otlp_endpoint": "https://127.0.0.1:9", "otlp_ca": "/etc/sluicegate/otlp/ca.crt"},
                "extraVolumes": [{"name": "collector", "secret": {"secretName": "collector"}}],
                "extraVolumeMounts": [{"name": "collector", "mountPath": "/etc/sluicegate/otlp", "readOnly": True}],
                "autoscaling": {"enabled": True}, "podDisruptionBudget": {"maxUnavailable": "25%"},
                "serviceMonitor": {"enabled": True, "labels": {"release": "p"}, "tokenSecret": {"name": "t"}},
                "networkPolicy": {"grpcFrom": [{"namespaceSelector": {}}], "httpFrom": [{"podSelector": {}}]},
                "image": {"repository": "registry/sluicegate", "tag": "1", "pullPolicy": "Always"},
                "imagePullSecrets": [{"name": "registry"}], "service": {"headless": False, "annotations": {"a": "b"}},
                "serviceAccountName": "s", "priorityClassName": "high", "podAnnotations": {"a": "b"}, "podLabels": {"a": "b"},
                "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}],
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}}},
            },
            always | {"Deployment", "PodDisruptionBudget", "HorizontalPodAutoscaler", "ServiceMonitor"},
        ),
        "open": (
            {"store": {"kind": "sqlite"}, "insecure": True, "tls": {"enabled": False}, "networkPolicy": {"grpcFrom": []}},
            always | {"StatefulSet"},
        ),
    }
    for name, (values, kinds) in cases.items():
        manifests = render(values)
        expect({manifest["kind"] for manifest in manifests} == kinds, f"{name}: {[m['kind'] for m in manifests]}")
        validate(manifests)
        check_references(manifests)
        start_with(name, values, manifests, others)
        print(f"-- chart, {name}: {len(manifests)} manifests, and a broker with them", flush=True)
    mongodb, sqlite = cases["mongodb"][0], cases["sqlite"][0]
    for base, change, why in [
        (mongodb, {"store": {"kind": "mongodb"}}, "set store.mongodb.existingSecret or store.mongodb.uri"),
        (mongodb, {"store": {"kind": "redis"}}, "must be one of"),
        (mongodb, {"tokens": {}}, "set tokens.existingSecret or tokens.file"),
        (mongodb, {"insecure": True}, "contradict each other"),
        (mongodb, {"tls": {}}, "set tls.existingSecret"),
        (mongodb, {"settings": {"listen": "127.0.0.1:1"}}, "settings.listen: the chart sets it"),
        (mongodb, {"replica": 3}, "additional properties 'replica' not allowed"),
        (mongodb, {"signals": {"fromSecret": True}}, "signals.fromSecret needs store.mongodb.existingSecret"),
        (sqlite, {"autoscaling": {"enabled": True}}, "one SQLite file has one broker"),
    ]:
        refused(base | change, why)


# --- the other files ---


def check_kubernetes():
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "sluicegate.yaml").read_text()))
    validate(manifests)
    check_references(manifests)


def check_keda():
    """The example for KEDA is one for the brokers beside it: what it names is there."""
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "keda.yaml").read_text()))
    validate(manifests)
    brokers = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "sluicegate.yaml").read_text()))
    [service], [workload] = of_kind(brokers, "Service"), of_kind(brokers, "Deployment")
    [scaled], [policy] = of_kind(manifests, "ScaledObject"), of_kind(manifests, "NetworkPolicy")
    secrets = {auth["metadata"]["name"]: auth["spec"]["secretTargetRef"] for auth in of_kind(manifests, "TriggerAuthentication")}
    for trigger in scaled["spec"]["triggers"]:
        metadata = trigger["metadata"]
        host, port = metadata.pop("scalerAddress").split(":")
        expect(host.split(".")[0] == service["metadata"]["name"], f"no such Service: {host}")
        expect(int(port) in [port["port"] for port in service["spec"]["ports"]], f"no such port of the Service: {port}")
        expect(metadata.keys() == {"queue", "targetReady", "targetAgeSeconds"}, f"not what a broker understands: {metadata}")
        expect(all(isinstance(value, str) for value in metadata.values()), f"KEDA takes text alone: {metadata}")
        parameters = {secret["parameter"] for secret in secrets[trigger["authenticationRef"]["name"]]}
        expect(parameters == {"caCert", "tlsClientCert", "tlsClientKey"}, f"KEDA shows no certificate: {parameters}")
    pod = workload["spec"]["template"]
    expect(policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items(), "the policy is for no broker")


def check_systemd():
    unit = SCRATCH / "sluicegate.service"
    text = (DEPLOY / "systemd" / "sluicegate.service").read_text()
    for credentials in ("#LoadCredential=", "LoadCredential="):
        unit.write_text(text.replace("/usr/local/bin/sluicegate", str(BIN / "sluicegate")).replace("#LoadCredential=", credentials))
        said = subprocess.run(["systemd-analyze", "verify", "--recursive-errors=no", unit], capture_output=True, text=True, timeout=LIMIT)
        # It names what it does not know, and leaves with 0 all the same.
        expect(said.returncode == 0 and unit.name not in said.stderr, f"systemd-analyze verify: {said.stderr}")
    run("systemd-analyze", "security", "--offline=yes", f"--threshold={int(MOST_EXPOSURE * 10)}", "--no-pager", unit)
    # Type=notify: systemd takes the unit for started, and for stopping, when the broker says so.
    settings = SCRATCH / "notify.toml"
    settings.write_text('store = "sqlite::memory:"\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(SCRATCH / "notify"))
        manager.settimeout(LIMIT)
        with broker(settings, SCRATCH, NOTIFY_SOCKET=manager.getsockname()) as (_, http):
            expect(manager.recv(100) == b"READY=1\n", "systemd is told something else than that the broker is ready")
            urllib.request.urlopen(f"http://{http}/readyz", timeout=LIMIT).close()
        expect(manager.recv(100) == b"STOPPING=1\n", "systemd is told something else than that the broker is stopping")
    print("-- the unit for systemd", flush=True)


def check_context():
    """What Docker is sent is enough to build from: Cargo finds every member of the workspace, and all that they name."""
    allowed = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    context = SCRATCH / "context"
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *allowed, cwd=DEPLOY.parent).splitlines():
        if (DEPLOY.parent / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(DEPLOY.parent / name, context / name)
    known = json.loads(run("cargo", "metadata", "--locked", "--no-deps", "--format-version", "1", cwd=context))
    for package in known["packages"]:
        for target in package["targets"]:
            expect(pathlib.Path(target["src_path"]).is_file(), f"{target['src_path']} is not sent to Docker")
    for name in re.findall(r"^RUN (deploy/\w+)", (DEPLOY / "Dockerfile").read_text(), re.M):
        expect((context / name).is_file(), f"{name} is not sent to Docker")
    print("-- what Docker builds from", flush=True)


@contextlib.contextmanager
def image():
    """Runs the broker as the image does: with the files of the image and the variables that it sets, but for its ports.
    Yields what runs a command beside it, and its two addresses."""
    root = SCRATCH / "image"
    run(DEPLOY / "collect", BIN / "sluicegate", root)
    dockerfile = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    variables = dict(word.split("=", 1) for line in re.findall(r"^ENV (.*)$", dockerfile, re.M) for word in line.split())
    with socket.socket() as grpc, socket.socket() as http:
        for free in (grpc, http):
            free.bind(("127.0.0.1", 0))
        ports = grpc.getsockname()[1], http.getsockname()[1]
    variables |= {"SLUICEGATE_LISTEN": f"127.0.0.1:{ports[0]}", "SLUICEGATE_HTTP_LISTEN": f"0.0.0.0:{ports[1]}"}
    if os.geteuid() == 0:
        os.chown(root / "var/lib/sluicegate", 7400, 7400)
        inside = [shutil.which("chroot", path="/usr/sbin:/usr/bin"), "--userspec=7400:7400", root]
    else:
        inside = [shutil.which("unshare"), "--map-root-user", "/usr/sbin/chroot", root]
    entry = [*inside, *json.loads(re.search(r"^ENTRYPOINT (.*)$", dockerfile, re.M)[1])]
    health = [*inside, *json.loads(re.search(r"^HEALTHCHECK .*CMD (.*)$", dockerfile, re.M)[1])]
    variables |= {"SLUICEGATE_INSECURE": "true"}
    with running(entry, "in its image", env=variables):
        yield lambda fails=False: run(*health, env=variables, fails=fails), ports


def check_image():
    with image() as (ask, (grpc, _)):
        ask()
        run(BIN / "sluice", "--server", f"http://127.0.0.1:{grpc}", "push", "q", "text")
    expect("no answer from 127.0.0.1:" in ask(fails=True), "the health check of a broker that has ended")
    print("-- the image", flush=True)


SCRATCH.mkdir()
# A broker takes no variables it does not know, and none of those of this machine.
for variable in [name for name in os.environ if name.startswith(("SLUICEGATE_", "SLUICE_"))]:
    del os.environ[variable]
check_chart()
check_kubernetes()
check_keda()
check_systemd()
check_context()
check_image()
