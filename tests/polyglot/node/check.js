// Checks that a Node client can work with a running broker: health, push, consume, settle, errors.
//
//     SLUICEGATE_ADDR=127.0.0.1:7400 node check.js
//
// Loads proto/ at run time, as any user would. Prints one line per check and stops at the first that fails. The behaviour of every
// rpc is checked by tests/polyglot/python/check.py.
'use strict';

const assert = require('node:assert/strict');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const protobuf = require('protobufjs');

const PROTO = path.resolve(__dirname, '../../../proto');
const LIMIT = 60_000;
const QUEUE = `js${process.pid}`;

const { sluicegate } = grpc.loadPackageDefinition(loader.loadSync('sluicegate/v1/queue_service.proto', {
  includeDirs: [PROTO], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true,
}));
const { grpc: { health } } = grpc.loadPackageDefinition(loader.fromJSON(protobuf.parse(`
  syntax = "proto3";
  package grpc.health.v1;
  message HealthCheckRequest { string service = 1; }
  message HealthCheckResponse { enum ServingStatus { UNKNOWN = 0; SERVING = 1; } ServingStatus status = 1; }
  service Health { rpc Check(HealthCheckRequest) returns (HealthCheckResponse); }
`).root.toJSON(), { enums: String }));
// The details of an error; field numbers as in google/rpc/status.proto and error_details.proto.
const details = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; }
`, { keepCase: true }).root;

const address = process.env.SLUICEGATE_ADDR ?? '127.0.0.1:7400';
const credentials = grpc.credentials.createInsecure();
const queues = new sluicegate.v1.QueueService(address, credentials);
const probe = new health.v1.Health(address, credentials);

/** Calls a unary rpc, with a deadline. */
function call(client, rpc, request) {
  return new Promise((resolve, reject) => {
    client[rpc](request, { deadline: Date.now() + LIMIT }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

/** The ErrorInfo of an error, which names its reason. */
function errorInfo(error) {
  const [bytes] = error.metadata.get('grpc-status-details-bin');
  const status = details.lookupType('Status').decode(bytes);
  const info = status.details.find((detail) => detail.type_url.endsWith('/google.rpc.ErrorInfo'));
  return details.lookupType('ErrorInfo').decode(info.value);
}

/** Fails unless both are the same, else says that the check passed. */
function same(what, seen, wanted) {
  assert.deepEqual(seen, wanted, `${what}: ${JSON.stringify(seen)} instead of ${JSON.stringify(wanted)}`);
  console.log(`ok ${what}`);
}

const outcomes = (answer) => answer.results.map((result) => result.outcome);

async function main() {
  same('health', (await call(probe, 'Check', { service: '' })).status, 'SERVING');

  const items = ['good', 'bad'].map((text) => ({ payload: Buffer.from(text), headers: { from: 'node' } }));
  const pushed = await call(queues, 'Push', { queue: QUEUE, items });
  same('Push: an id for each item', new Set(pushed.results.map((result) => result.id)).size, 2);

  const request = { queue: QUEUE, max_in_flight: 1, lease: { seconds: 600, nanos: 0 } };
  const stream = queues.Consume(request, { deadline: Date.now() + LIMIT });
  const seen = [];
  for await (const { deliveries } of stream) {
    for (const { receipt, item } of deliveries) {
      const text = item.payload.toString();
      seen.push([text, item.attempt, item.headers.from]);
      if (text === 'bad' && item.attempt === 1) {
        const rollback = { receipt, reason: 'once more', delay: { seconds: 0, nanos: 0 } };
        same('Rollback', outcomes(await call(queues, 'Rollback', { items: [rollback] })), ['OUTCOME_OK']);
      } else {
        same('Commit', outcomes(await call(queues, 'Commit', { receipts: [receipt] })), ['OUTCOME_OK']);
      }
    }
    if (seen.length === 3) break;
  }
  stream.cancel();
  same('Consume: in order, and again after a rollback', seen, [['good', 1, 'node'], ['bad', 1, 'node'], ['bad', 2, 'node']]);

  const error = await call(queues, 'Push', { queue: 'no spaces', items }).catch((caught) => caught);
  same('an error has a code', error.code, grpc.status.INVALID_ARGUMENT);
  const { domain, reason } = errorInfo(error);
  same('and a reason', [domain, reason], ['sluicegate', 'INVALID_FIELD']);
}

main()
  .catch((error) => {
    console.error(`FAILED ${error.code === undefined ? error.message : `${error.code}: ${error.details ?? error.message}`}`);
    process.exitCode = 1;
  })
  .finally(() => [queues, probe].forEach((client) => client.close()));
