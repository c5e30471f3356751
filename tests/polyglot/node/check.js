// Checks every rpc of a running broker from Node.
//
//     SLUICEGATE_ADDR=127.0.0.1:7400 node check.js
//
// Loads proto/ at run time, as any user would. Prints one line per check and stops at the first
// that fails. Uses queues with a name of this run, so it can run against any broker that no one else
// depends on. tests/polyglot/python/check.py makes more checks of the same kind.
'use strict';

const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const protobuf = require('protobufjs');

const PROTO = path.resolve(__dirname, '../../../proto');
const LIMIT = 30_000;
const RUN = `js${process.pid}`;
const { INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION } = grpc.status;

const definition = loader.loadSync(
  ['queue_service', 'admin_service', 'schedule_service'].map((file) => `sluicegate/v1/${file}.proto`),
  { includeDirs: [PROTO], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true },
);
const { sluicegate } = grpc.loadPackageDefinition(definition);

// The error details that the checks look into; field numbers as in google/rpc/error_details.proto.
const details = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; }
  message BadRequest { message FieldViolation { string field = 1; string description = 2; } repeated FieldViolation field_violations = 1; }
`, { keepCase: true }).root;

const health = grpc.makeGenericClientConstructor(serviceOf(`
  syntax = "proto3";
  message Request { string service = 1; }
  message Response { int32 status = 1; }
`, '/grpc.health.v1.Health/Check'));

function serviceOf(proto, method) {
  const { root } = protobuf.parse(proto, { keepCase: true });
  const [request, response] = [root.lookupType('Request'), root.lookupType('Response')];
  return {
    Check: {
      path: method,
      requestStream: false,
      responseStream: false,
      requestSerialize: (value) => Buffer.from(request.encode(request.create(value)).finish()),
      requestDeserialize: (bytes) => request.decode(bytes),
      responseSerialize: (value) => Buffer.from(response.encode(response.create(value)).finish()),
      responseDeserialize: (bytes) => response.decode(bytes),
    },
  };
}

const address = process.env.SLUICEGATE_ADDR;
const credentials = grpc.credentials.createInsecure();
const clients = ['QueueService', 'AdminService', 'ScheduleService'].map(
  (service) => new sluicegate.v1[service](address, credentials),
);
const [work, admin, schedules] = clients;

let checks = 0;
let rpc = '';

function check(what, holds, seen = '') {
  if (!holds) throw new Error(`${what}: ${JSON.stringify(seen)}`);
  checks += 1;
  console.log(`ok ${rpc}: ${what}`);
}

function same(what, seen, wanted) {
  check(what, JSON.stringify(seen) === JSON.stringify(wanted), { seen, wanted });
}

/** Calls a unary rpc. */
function call(client, rpc, request) {
  return new Promise((resolve, reject) => {
    client[rpc](request, { deadline: Date.now() + 2 * LIMIT }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

/** The messages of a stream, one `await next()` at a time; null at its end. */
function reader(stream) {
  const messages = [];
  const waiting = [];
  const give = (entry) => (waiting.length ? waiting.shift()(entry) : messages.push(entry));
  stream.on('data', (message) => give({ message }));
  stream.on('end', () => give({ message: null }));
  stream.on('error', (error) => give({ error }));
  return async () => {
    const entry = messages.length ? messages.shift() : await new Promise((resolve) => waiting.push(resolve));
    if (entry.error) throw entry.error;
    return entry.message;
  };
}

/** Checks the code, the ErrorInfo and, if given, the field that is named. */
async function refused(what, code, ask, field) {
  let error;
  try {
    const answer = await ask();
    check(what, false, answer);
  } catch (caught) {
    if (caught.code === undefined) throw caught;
    error = caught;
  }
  const [bytes] = error.metadata.get('grpc-status-details-bin');
  const status = details.lookupType('Status').decode(bytes ?? Buffer.alloc(0));
  const found = (kind) => {
    const any = status.details.find((detail) => detail.type_url.endsWith(`google.rpc.${kind}`));
    return any && details.lookupType(kind).decode(any.value);
  };
  const info = found('ErrorInfo');
  const named = (found('BadRequest')?.field_violations ?? []).map((violation) => violation.field);
  const holds = error.code === code && info?.domain === 'sluicegate' && /^[A-Z_]+$/.test(info.reason);
  check(`${what}: ${grpc.status[code]}`, holds && (!field || named.includes(field)), { code: error.code, details: error.details, info, named });
}

/** Asks until the answer is true; for figures that are remembered for a moment. */
async function until(what, ask) {
  const end = Date.now() + LIMIT;
  while (!(await ask())) {
    if (Date.now() > end) check(what, false, `not within ${LIMIT} ms`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  check(what, true);
}

const name = (suffix) => `${RUN}.${suffix}`;
const duration = (value) => ({ seconds: Math.trunc(value), nanos: Math.round((value % 1) * 1e9) });
const texts = (deliveries) => deliveries.map((delivery) => delivery.item.payload.toString());
const outcomes = (answer) => answer.results.map((result) => result.outcome.replace('OUTCOME_', ''));

async function push(queue, payloads, fields = {}) {
  const items = payloads.map((payload) => ({ payload: Buffer.from(payload), ...fields }));
  return (await call(work, 'Push', { queue, items, producer: RUN })).results;
}

async function reserve(queue, { max_items = 1, wait = LIMIT / 1000, lease = 600 } = {}) {
  const request = { queue, max_items, wait: duration(wait), lease: duration(lease), consumer: RUN };
  return (await call(work, 'Reserve', request)).deliveries;
}

const commit = async (...receipts) => outcomes(await call(work, 'Commit', { receipts }));
const rollback = async (receipt, reason = '', fields = {}) =>
  outcomes(await call(work, 'Rollback', { items: [{ receipt, reason, delay: duration(0), ...fields }] }))[0];
const create = async (queue, settings = {}) => (await call(admin, 'CreateQueue', { queue: { name: queue, ...settings } })).queue;
const list = async (queue, state = 'ITEM_STATE_UNSPECIFIED') => (await call(admin, 'ListItems', { queue, state })).items;
const stats = async (queue) => (await call(admin, 'GetQueueStats', { queue })).stats;

const SECTIONS = {
  async health() {
    const client = new health(address, credentials);
    clients.push(client);
    for (const service of ['', 'sluicegate.v1.QueueService']) {
      same(`health of '${service}' is SERVING`, (await call(client, 'Check', { service })).status, 1);
    }
  },

  // --- QueueService ---

  async Push() {
    const queue = name('push');
    const results = await push(queue, ['a', 'b', 'c'], { content_type: 'text/plain', headers: { trace: '1' } });
    same('ids differ', new Set(results.map((result) => result.id)).size, 3);
    await refused('a bad queue name', INVALID_ARGUMENT, () => push('no spaces', ['x']), 'queue');
    await refused('no items', INVALID_ARGUMENT, () => push(queue, []), 'items');
    await refused('a priority of 10', INVALID_ARGUMENT, () => push(queue, ['x'], { priority: 10 }), 'items[0].priority');
    await refused('a negative delay', INVALID_ARGUMENT, () => push(queue, ['x'], { delay: duration(-1) }), 'items[0].delay');
    await push(queue, ['first'], { priority: 9 });
    same('priority 9 comes first', texts(await reserve(queue, { max_items: 4 })), ['first', 'a', 'b', 'c']);
    await push(queue, ['much later'], { delay: duration(600) });
    same('a delayed item is not there yet', await reserve(queue, { wait: 0 }), []);
    await push(queue, ['soon'], { delay: duration(0.3) });
    same('and comes in time', texts(await reserve(queue)), ['soon']);
    const [first] = await push(queue, ['once'], { dedup_id: 'd1' });
    const [second] = await push(queue, ['twice'], { dedup_id: 'd1' });
    check('a second push with the same dedup_id stores nothing', second.deduplicated && second.id === first.id, second);
  },

  async PushStream() {
    const queue = name('pushstream');
    const stream = work.PushStream({ deadline: Date.now() + LIMIT });
    const next = reader(stream);
    [queue, 'not a name', queue].forEach((target, at) =>
      stream.write({ batch_id: at + 1, queue: target, items: [{ payload: Buffer.from(`${at}`) }] }));
    stream.end();
    const answers = {};
    for (let answer = await next(); answer; answer = await next()) answers[answer.batch_id] = answer;
    same('every batch is answered', Object.keys(answers), ['1', '2', '3']);
    same('a bad batch fails alone', answers[2].error?.code, INVALID_ARGUMENT);
    same('the others are stored', (await list(queue)).length, 2);
  },

  async Pop() {
    const queue = name('pop');
    await push(queue, ['a', 'b']);
    const popped = (await call(work, 'Pop', { queue, max_items: 5, wait: duration(30) })).items;
    same('pop takes what is there', popped.map((item) => item.payload.toString()), ['a', 'b']);
    same('for good', (await call(work, 'Pop', { queue })).items, []);
  },

  async Reserve() {
    const queue = name('reserve');
    await push(queue, ['a']);
    const [{ item, lease_expire_time }] = await reserve(queue);
    same('state and counts', [item.state, item.attempt, item.deliveries], ['ITEM_STATE_RESERVED', 1, 1]);
    same('names of producer and consumer', [item.producer, item.consumer], [RUN, RUN]);
    check('a lease in the future', lease_expire_time.seconds > Date.now() / 1000 + 500, lease_expire_time);
    same('nobody else gets it', await reserve(queue, { wait: 0 }), []);
    await refused('1,001 items', INVALID_ARGUMENT, () => reserve(queue, { max_items: 1001 }), 'max_items');
  },

  async Consume() {
    const queue = name('consume');
    await create(queue);
    const stream = work.Consume({ queue, max_in_flight: 2, lease: duration(600) });
    const next = reader(stream);
    await until('the consumer is counted', async () => (await stats(queue)).consumers === 1);
    await push(queue, ['a', 'b', 'c']);
    const held = [];
    while (held.length < 2) held.push(...(await next()).deliveries);
    same('two at a time', texts(held), ['a', 'b']);
    same('a commit makes room', await commit(held[0].receipt), ['OK']);
    same('for the next', texts((await next()).deliveries), ['c']);
    stream.cancel();
    const back = [];
    while (back.length < 2) back.push(...(await reserve(queue, { max_items: 2 })));
    same('an ended stream gives back at once', texts(back).sort(), ['b', 'c']);
  },

  async ConsumeStream() {
    const queue = name('consumestream');
    await push(queue, ['a', 'b', 'c']);
    const stream = work.ConsumeStream({ deadline: Date.now() + 2 * LIMIT });
    const next = reader(stream);
    stream.write({ open: { queue, max_in_flight: 1, lease: duration(600) } });
    const { opened } = await next();
    same('opened', [opened.max_in_flight, opened.lease.seconds], [1, 600]);
    const [first] = (await next()).deliveries.deliveries;
    same('one delivery', first.item.payload.toString(), 'a');
    stream.write({ extend: { receipts: [first.receipt], lease: duration(900) } });
    same('extended', outcomes((await next()).extended), ['OK']);
    stream.write({ commit: { receipts: [first.receipt] } });
    const answers = [await next(), await next()];
    same('settled', outcomes(answers.find((answer) => answer.settled).settled), ['OK']);
    const [second] = answers.find((answer) => answer.deliveries).deliveries.deliveries;
    same('and the next delivery', second.item.payload.toString(), 'b');
    stream.write({ flow: { max_in_flight: 0 } });
    same('flow is answered', (await next()).flow.max_in_flight, 0);
    stream.write({ rollback: { items: [{ receipt: second.receipt, delay: duration(0) }] } });
    same('rolled back', outcomes((await next()).settled), ['OK']);
    stream.end();
    same('the stream ends when the client is done', await next(), null);
    await until('and nothing stays leased', async () => {
      const { reserved, ready } = await stats(queue);
      return reserved === 0 && ready === 2;
    });
  },

  async Commit() {
    const queue = name('commit');
    await push(queue, ['a']);
    const [first] = await reserve(queue, { lease: 0.2 });
    const [again] = await reserve(queue);
    same('a lapsed item comes again', [again.item.payload.toString(), again.item.attempt, again.item.deliveries], ['a', 2, 2]);
    same('its old receipt: LEASE_LOST', await commit(first.receipt), ['LEASE_LOST']);
    same('its new receipt: OK', await commit(again.receipt), ['OK']);
    same('repeated: GONE', await commit(again.receipt, first.receipt), ['GONE', 'GONE']);
    await refused('a malformed receipt', INVALID_ARGUMENT, () => commit('nonsense'), 'receipts[0]');
  },

  async Rollback() {
    const [queue, dead] = [name('rollback'), name('rollback.dead')];
    await create(queue, { max_attempts: 2, dead_letter_queue: dead });
    await push(queue, ['a']);
    same('given back', await rollback((await reserve(queue))[0].receipt, 'no luck'), 'OK');
    let [delivery] = await reserve(queue);
    same('with its reason', [delivery.item.attempt, delivery.item.last_reason], [2, 'no luck']);
    same('keep_attempt spares it', await rollback(delivery.receipt, 'spared', { keep_attempt: true }), 'OK');
    [delivery] = await reserve(queue);
    same('attempt stays, deliveries grow', [delivery.item.attempt, delivery.item.deliveries], [2, 3]);
    same('the last attempt dead-letters', await rollback(delivery.receipt, 'the end'), 'DEAD_LETTERED');
    const [letter] = await reserve(dead);
    same('with reason and origin', [letter.item.last_reason, letter.item.origin_queue], ['the end', queue]);
  },

  async Extend() {
    const queue = name('extend');
    await push(queue, ['a']);
    const [{ receipt }] = await reserve(queue, { lease: 5 });
    const request = { receipts: [receipt], lease: duration(600) };
    const [result] = (await call(work, 'Extend', request)).results;
    check('extended', result.outcome === 'OUTCOME_OK' && result.lease_expire_time.seconds > Date.now() / 1000 + 500, result);
    same('same receipt', await commit(receipt), ['OK']);
    same('gone: GONE', outcomes(await call(work, 'Extend', request)), ['GONE']);
  },

  async Move() {
    const [queue, target] = [name('move'), name('move.next')];
    await create(name('elsewhere'), { group: name('othergroup') });
    const [{ id }] = await push(queue, ['a'], { headers: { kept: '1' } });
    const [{ receipt }] = await reserve(queue);
    await refused('a move to another group', FAILED_PRECONDITION, () => call(work, 'Move', { receipt, to_queue: name('elsewhere') }));
    const request = { receipt, to_queue: target, payload: Buffer.from('b'), headers: { new: '2' }, priority: 5 };
    const answer = await call(work, 'Move', request);
    same('moved with its id', [answer.outcome, answer.id], ['OUTCOME_OK', id]);
    const [{ item }] = await reserve(target);
    same('payload, priority', [item.payload.toString(), item.priority, item.attempt], ['b', 5, 1]);
    same('headers are merged', [item.headers.kept, item.headers.new], ['1', '2']);
  },

  async CommitAndPush() {
    const [queue, one, two] = [name('fork'), name('fork.one'), name('fork.two')];
    await create(two, { group: name('forkgroup') });
    await push(queue, ['a']);
    const [{ receipt }] = await reserve(queue);
    const pushes = [one, two].map((target) => ({ queue: target, item: { payload: Buffer.from(target) } }));
    const answer = await call(work, 'CommitAndPush', { receipt, pushes });
    same('one commit, two pushes', [answer.outcome, answer.results.length], ['OUTCOME_OK', 2]);
    same('both are there', texts([...(await reserve(one)), ...(await reserve(two))]), [one, two]);
    same('repeated: GONE', (await call(work, 'CommitAndPush', { receipt, pushes })).outcome, 'OUTCOME_GONE');
    same('nothing pushed', await reserve(one, { wait: 0 }), []);
  },

  // --- AdminService ---

  async CreateQueue() {
    const queue = name('create');
    const made = await create(queue, { max_attempts: 3, labels: { team: 'js' } });
    same('created', [made.name, made.group, made.max_attempts], [queue, 'default', 3]);
    same('the same again is answered', await create(queue, { max_attempts: 3, labels: { team: 'js' } }), made);
    await refused('other settings', ALREADY_EXISTS, () => create(queue, { max_attempts: 4 }));
    await refused('a bad name', INVALID_ARGUMENT, () => create('no spaces'), 'queue.name');
  },

  async GetQueue() {
    const found = (await call(admin, 'GetQueue', { name: name('create') })).queue;
    same('its settings', [found.name, found.max_attempts], [name('create'), 3]);
    await refused('one that is not there', NOT_FOUND, () => call(admin, 'GetQueue', { name: name('missing') }));
  },

  async UpdateQueue() {
    const queue = { name: name('create'), max_attempts: 7, labels: { ignored: '1' } };
    const changed = (await call(admin, 'UpdateQueue', { queue, update_mask: { paths: ['max_attempts'] } })).queue;
    same('only what the mask names', [changed.max_attempts, changed.labels], [7, { team: 'js' }]);
    await refused('an unknown field', INVALID_ARGUMENT,
      () => call(admin, 'UpdateQueue', { queue, update_mask: { paths: ['no_such_field'] } }), 'update_mask');
  },

  async ListQueues() {
    const seen = [];
    let page = { next_page_token: '' };
    do {
      page = await call(admin, 'ListQueues', { page_size: 2, page_token: page.next_page_token });
      seen.push(...page.queues.map((queue) => queue.name));
    } while (page.next_page_token);
    same('by name, each once', seen, [...new Set(seen)].sort());
    check('with ours', seen.includes(name('create')), seen);
    await refused('a negative page size', INVALID_ARGUMENT, () => call(admin, 'ListQueues', { page_size: -1 }), 'page_size');
  },

  async 'PauseQueue, ResumeQueue'() {
    const queue = name('pause');
    await create(queue);
    same('paused', (await call(admin, 'PauseQueue', { name: queue })).queue.paused, true);
    await push(queue, ['a']);
    same('pushes go on, deliveries do not', await reserve(queue, { wait: 0.2 }), []);
    same('resumed', (await call(admin, 'ResumeQueue', { name: queue })).queue.paused, false);
    same('and delivered', texts(await reserve(queue)), ['a']);
  },

  async PurgeQueue() {
    const queue = name('purge');
    await push(queue, ['a', 'b', 'c']);
    const [held] = await reserve(queue);
    same('all but the reserved one', (await call(admin, 'PurgeQueue', { name: queue })).purged_items, 2);
    same('which still settles', await commit(held.receipt), ['OK']);
  },

  async DeleteQueue() {
    const queue = name('delete');
    await push(queue, ['a']);
    await refused('a queue with items', FAILED_PRECONDITION, () => call(admin, 'DeleteQueue', { name: queue }));
    same('by force', (await call(admin, 'DeleteQueue', { name: queue, force: true })).deleted_items, 1);
    await refused('twice', NOT_FOUND, () => call(admin, 'DeleteQueue', { name: queue, force: true }));
  },

  async GetQueueStats() {
    const queue = name('stats');
    await push(queue, ['a', 'b', 'c']);
    await push(queue, ['later'], { delay: duration(600) });
    await commit((await reserve(queue))[0].receipt);
    await reserve(queue);
    await until('depths and totals', async () => {
      const { ready, delayed, reserved, pushed, delivered, committed } = await stats(queue);
      return String([ready, delayed, reserved, pushed, delivered, committed]) === '1,1,1,4,2,1';
    });
  },

  async WatchQueues() {
    const queue = name('watch');
    await create(queue);
    const stream = admin.WatchQueues({ queues: [queue] }, { deadline: Date.now() + LIMIT });
    const next = reader(stream);
    same('the watched queue at first', (await next()).stats.map((entry) => entry.queue), [queue]);
    await push(queue, ['a']);
    while (!(await next()).stats.some((entry) => entry.ready === 1));
    check('then its changes', true);
    stream.cancel();
  },

  async ListItems() {
    const queue = name('items');
    await push(queue, ['a', 'b', 'c']);
    await reserve(queue);
    same('all', (await list(queue)).length, 3);
    same('by state', (await list(queue, 'ITEM_STATE_READY')).map((item) => item.payload.toString()), ['b', 'c']);
    const page = await call(admin, 'ListItems', { queue, page_size: 2 });
    const rest = await call(admin, 'ListItems', { queue, page_size: 2, page_token: page.next_page_token });
    same('paged', [page.items.length, rest.items.length, rest.next_page_token], [2, 1, '']);
  },

  async GetItem() {
    const queue = name('items');
    const [{ id }] = await push(queue, ['one'], { content_type: 'text/plain' });
    const { item } = await call(admin, 'GetItem', { queue, id });
    same('found', [item.payload.toString(), item.content_type, item.queue], ['one', 'text/plain', queue]);
    await refused('in another queue', NOT_FOUND, () => call(admin, 'GetItem', { queue: name('create'), id }));
  },

  async DeleteItem() {
    const queue = name('deleteitem');
    const [{ id }] = await push(queue, ['a']);
    const [{ receipt }] = await reserve(queue);
    await call(admin, 'DeleteItem', { queue, id });
    same('its receipt answers GONE', await commit(receipt), ['GONE']);
    await refused('twice', NOT_FOUND, () => call(admin, 'DeleteItem', { queue, id }));
  },

  async ReplayItems() {
    const queue = name('history');
    await create(queue, { retention: duration(600) });
    const ids = (await push(queue, ['a', 'b'])).map((result) => result.id);
    await commit(...(await reserve(queue, { max_items: 2 })).map((delivery) => delivery.receipt));
    same('kept as history', (await list(queue, 'ITEM_STATE_PROCESSED')).map((item) => item.id).sort(), [...ids].sort());
    same('by id', (await call(admin, 'ReplayItems', { queue, ids: { ids: ids.slice(0, 1) } })).replayed_items, 1);
    same('comes again', texts(await reserve(queue)), ['a']);
    const start_time = { seconds: Math.trunc(Date.now() / 1000) - 600, nanos: 0 };
    same('by time', (await call(admin, 'ReplayItems', { queue, process_time: { start_time } })).replayed_items, 1);
    same('comes again too', texts(await reserve(queue)), ['b']);
  },

  async RedriveItems() {
    const [queue, dead] = [name('redrive'), name('redrive.dead')];
    await create(queue, { max_attempts: 1, dead_letter_queue: dead });
    await push(queue, ['a', 'b']);
    for (const delivery of await reserve(queue, { max_items: 2 })) await rollback(delivery.receipt, `bad ${delivery.item.payload}`);
    same('by reason', (await call(admin, 'RedriveItems', { queue: dead, filter: { reason_contains: 'bad b' } })).redriven_items, 1);
    const [{ item }] = await reserve(queue);
    same('back where it came from, attempt 1', [item.payload.toString(), item.attempt], ['b', 1]);
    same('the rest', (await call(admin, 'RedriveItems', { queue: dead })).redriven_items, 1);
    same('is back too', texts(await reserve(queue)), ['a']);
  },

  // --- ScheduleService ---

  async schedules() {
    const [queue, every] = [name('ticks'), name('every-second')];
    const schedule = { name: every, queue, cron: '* * * * * *', time_zone: 'Europe/Vienna', item: { payload: Buffer.from('tick') } };
    const made = (await call(schedules, 'CreateSchedule', { schedule })).schedule;
    check('CreateSchedule', made.name === every && made.next_time, made);
    same('it ticks', texts(await reserve(queue)), ['tick']);
    same('GetSchedule', (await call(schedules, 'GetSchedule', { name: every })).schedule.cron, '* * * * * *');
    const listed = (await call(schedules, 'ListSchedules', {})).schedules.map((found) => found.name);
    check('ListSchedules', listed.includes(every), listed);
    same('PauseSchedule', (await call(schedules, 'PauseSchedule', { name: every })).schedule.paused, true);
    same('ResumeSchedule', (await call(schedules, 'ResumeSchedule', { name: every })).schedule.paused, false);
    await call(schedules, 'DeleteSchedule', { name: every });
    await refused('DeleteSchedule, then GetSchedule', NOT_FOUND, () => call(schedules, 'GetSchedule', { name: every }));
    await refused('a bad cron expression', INVALID_ARGUMENT,
      () => call(schedules, 'CreateSchedule', { schedule: { ...schedule, cron: 'every now and then' } }), 'schedule.cron');
  },
};

async function main() {
  if (!address) throw new Error('set SLUICEGATE_ADDR to the broker, for example 127.0.0.1:7400');
  for (const [title, section] of Object.entries(SECTIONS)) {
    rpc = title;
    await section();
  }
  console.log(`${checks} checks passed from Node`);
}

main()
  .catch((error) => {
    console.error(`FAILED ${rpc}: ${error.code === undefined ? error.message : `${grpc.status[error.code]}: ${error.details}`}`);
    process.exitCode = 1;
  })
  .finally(() => clients.forEach((client) => client.close()));
