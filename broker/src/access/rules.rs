//! The table of what each call needs. A call that is not in the table is refused.

use crate::domain::Action::{self, Consume, Create, Manage, Produce, View};

/// What a call needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Nothing: probes have no token.
    Nothing,
    /// Any valid token.
    AnyToken,
    /// These permissions, which are checked for each queue that the call names.
    Permissions(&'static [Need]),
}

/// One permission that a call needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// The action.
    pub(crate) action: Action,
    /// On which queues, and when, in words.
    pub(crate) on: &'static str,
}

/// One line of the table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// The call: for gRPC `/package.Service/Method`, for HTTP the path.
    pub(crate) call: &'static str,
    /// What the call needs.
    pub(crate) needs: Needs,
}

impl Rule {
    /// Returns the rule of a call; `None` if there is no such call.
    pub(crate) fn of(call: &str) -> Option<&'static Self> {
        RULES.iter().find(|rule| rule.call == call)
    }

    /// Returns true if the call is a stream of messages in either direction, which may last.
    pub(crate) fn is_stream(call: &str) -> bool {
        STREAMS.contains(&call)
    }

    /// Returns true if the call only reads, and its answer may be large.
    pub(crate) fn reads_much(call: &str) -> bool {
        LARGE_READS.contains(&call)
    }

    /// Returns true if the rule mentions the action.
    pub(crate) fn mentions(&self, action: Action) -> bool {
        match self.needs {
            Needs::Permissions(needs) => needs.iter().any(|need| need.action == action),
            Needs::Nothing | Needs::AnyToken => false,
        }
    }

    /// Returns true if each use of the call is written to the audit log, not only each refusal.
    pub(crate) fn is_audited(&self) -> bool {
        match self.needs {
            Needs::Permissions([first, ..]) => {
                matches!(first.action, Manage | Create | Action::Admin)
            }
            _ => false,
        }
    }
}

const fn need(action: Action, on: &'static str) -> Need {
    Need { action, on }
}

const fn rule(call: &'static str, needs: &'static [Need]) -> Rule {
    Rule { call, needs: Needs::Permissions(needs) }
}

const THE_QUEUE: &str = "the queue";
const EVERYTHING: &str = "all queues, by the pattern `*`";
const OF_RECEIPTS: &str = "the queue of each receipt";
const OF_SCHEDULE: &str = "the queue of the schedule";
const OF_SCALER: &str = "the queue that the metadata names";
const NEW_QUEUE: &str = "the queue, if the push creates it";
const NEW_LINKED: &str = "such a `dead_letter_queue`, if it is not there";
const NEW_TARGET: &str = "`to_queue`, if it is not there";
const NEW_SCHEDULED: &str = "`queue`, if it is not there";
const PAYLOADS: &str = "the queue: for payloads, which are left out otherwise";
const OF_OPERATION: &str = "the queue of the operation";
const OF_TEMPLATE: &str = "all queues that the pattern stands for, by one permission";
const TEMPLATE_AND_LINK: &str = "all queues that the pattern stands for, by one permission; and `dead_letter_queue`, if it is set";
const SEARCHED: &str =
    "the queue of the operation: for `payload_contains`, which is left out otherwise";
const TOLD: &str = "the queue of the operation: to be told that `manage` is missing, not that there is no such operation";
const OR_PAYLOADS: &str = "the queue, in place of `consume`";

/// The rules, those of the busiest calls first.
pub(crate) const RULES: &[Rule] = &[
    rule("/sluicegate.v1.QueueService/Push", &[need(Produce, THE_QUEUE), need(Create, NEW_QUEUE)]),
    rule("/sluicegate.v1.QueueService/Commit", &[need(Consume, OF_RECEIPTS)]),
    rule("/sluicegate.v1.QueueService/Reserve", &[need(Consume, THE_QUEUE)]),
    rule(
        "/sluicegate.v1.QueueService/PushStream",
        &[need(Produce, "the queue of each batch"), need(Create, NEW_QUEUE)],
    ),
    rule("/sluicegate.v1.QueueService/Pop", &[need(Consume, THE_QUEUE)]),
    rule("/sluicegate.v1.QueueService/Consume", &[need(Consume, THE_QUEUE)]),
    rule(
        "/sluicegate.v1.QueueService/ConsumeStream",
        &[need(Consume, "the queue, and the queue of each receipt")],
    ),
    rule("/sluicegate.v1.QueueService/Rollback", &[need(Consume, OF_RECEIPTS)]),
    rule("/sluicegate.v1.QueueService/Extend", &[need(Consume, OF_RECEIPTS)]),
    rule(
        "/sluicegate.v1.QueueService/Move",
        &[
            need(Consume, "the queue of the receipt"),
            need(
                Produce,
                "`to_queue`, if the move changes payload, content type, headers or priority, or the token may not consume from it",
            ),
            need(Create, "`to_queue`, if the move creates it"),
        ],
    ),
    rule(
        "/sluicegate.v1.QueueService/CommitAndPush",
        &[
            need(Consume, "the queue of the receipt"),
            need(Produce, "the queue of each push"),
            need(Create, "each queue that a push creates"),
        ],
    ),
    rule(
        "/sluicegate.v1.AdminService/CreateQueue",
        &[
            need(Create, THE_QUEUE),
            need(Manage, "`dead_letter_queue`, if set and not the queue's own `<queue>.dead`"),
            need(Create, NEW_LINKED),
        ],
    ),
    rule("/sluicegate.v1.AdminService/GetQueue", &[need(View, THE_QUEUE)]),
    rule(
        "/sluicegate.v1.AdminService/UpdateQueue",
        &[
            need(
                Manage,
                "the queue, and `dead_letter_queue`, if it is changed to another than `<queue>.dead`",
            ),
            need(Create, NEW_LINKED),
        ],
    ),
    rule("/sluicegate.v1.AdminService/DeleteQueue", &[need(Manage, THE_QUEUE)]),
    rule(
        "/sluicegate.v1.AdminService/ListQueues",
        &[need(View, "each queue: others are left out")],
    ),
    rule("/sluicegate.v1.AdminService/PauseQueue", &[need(Manage, THE_QUEUE)]),
    rule("/sluicegate.v1.AdminService/ResumeQueue", &[need(Manage, THE_QUEUE)]),
    rule("/sluicegate.v1.AdminService/PurgeQueue", &[need(Manage, THE_QUEUE)]),
    rule("/sluicegate.v1.AdminService/GetQueueStats", &[need(View, THE_QUEUE)]),
    rule("/sluicegate.v1.AdminService/BatchGetQueueStats", &[need(View, "each queue")]),
    rule(
        "/sluicegate.v1.AdminService/WatchQueues",
        &[need(View, "each queue that is named; if none is, others are left out")],
    ),
    rule(
        "/sluicegate.v1.AdminService/ListItems",
        &[need(View, THE_QUEUE), need(Consume, PAYLOADS), need(Manage, OR_PAYLOADS)],
    ),
    rule(
        "/sluicegate.v1.AdminService/GetItem",
        &[need(View, THE_QUEUE), need(Consume, PAYLOADS), need(Manage, OR_PAYLOADS)],
    ),
    rule("/sluicegate.v1.AdminService/DeleteItem", &[need(Manage, THE_QUEUE)]),
    rule("/sluicegate.v1.AdminService/ReplayItems", &[need(Manage, THE_QUEUE)]),
    rule(
        "/sluicegate.v1.AdminService/RedriveItems",
        &[need(Manage, "the dead-letter queue, and `to_queue`, if set"), need(Create, NEW_TARGET)],
    ),
    Rule { call: "/sluicegate.v1.AdminService/GetBroker", needs: Needs::AnyToken },
    rule("/sluicegate.v1.AdminService/ListBrokers", &[need(View, EVERYTHING)]),
    rule(
        "/sluicegate.v1.AdminService/ListConsumers",
        &[need(View, "the queue of each consumer: others are left out; the queue, if it is named")],
    ),
    rule(
        "/sluicegate.v1.ScheduleService/CreateSchedule",
        &[need(Manage, OF_SCHEDULE), need(Create, NEW_SCHEDULED)],
    ),
    rule("/sluicegate.v1.ScheduleService/GetSchedule", &[need(Manage, OF_SCHEDULE)]),
    rule(
        "/sluicegate.v1.ScheduleService/ListSchedules",
        &[need(Manage, "the queue of each schedule: others are left out")],
    ),
    rule(
        "/sluicegate.v1.ScheduleService/UpdateSchedule",
        &[
            need(Manage, "the queue of the schedule, and `queue`, if it is changed"),
            need(Create, NEW_SCHEDULED),
        ],
    ),
    rule("/sluicegate.v1.ScheduleService/TriggerSchedule", &[need(Manage, OF_SCHEDULE)]),
    rule("/sluicegate.v1.ScheduleService/DeleteSchedule", &[need(Manage, OF_SCHEDULE)]),
    rule("/sluicegate.v1.ScheduleService/PauseSchedule", &[need(Manage, OF_SCHEDULE)]),
    rule("/sluicegate.v1.ScheduleService/ResumeSchedule", &[need(Manage, OF_SCHEDULE)]),
    rule(
        "/sluicegate.v1.OperationService/StartOperation",
        &[need(Manage, "the queue, and `to_queue` of a redrive, if set"), need(Create, NEW_TARGET)],
    ),
    rule(
        "/sluicegate.v1.OperationService/GetOperation",
        &[need(View, OF_OPERATION), need(Consume, SEARCHED), need(Manage, OR_PAYLOADS)],
    ),
    rule(
        "/sluicegate.v1.OperationService/ListOperations",
        &[
            need(
                View,
                "the queue of each operation: others are left out; the queue, if it is named",
            ),
            need(Consume, SEARCHED),
            need(Manage, OR_PAYLOADS),
        ],
    ),
    rule(
        "/sluicegate.v1.OperationService/CancelOperation",
        &[need(Manage, OF_OPERATION), need(View, TOLD)],
    ),
    rule(
        "/sluicegate.v1.TemplateService/CreateTemplate",
        &[need(Manage, TEMPLATE_AND_LINK), need(Create, NEW_LINKED)],
    ),
    rule("/sluicegate.v1.TemplateService/GetTemplate", &[need(View, OF_TEMPLATE)]),
    rule(
        "/sluicegate.v1.TemplateService/ListTemplates",
        &[need(
            View,
            "all queues that the pattern of each template stands for: others are left out",
        )],
    ),
    rule(
        "/sluicegate.v1.TemplateService/UpdateTemplate",
        &[need(Manage, TEMPLATE_AND_LINK), need(Create, NEW_LINKED)],
    ),
    rule("/sluicegate.v1.TemplateService/DeleteTemplate", &[need(Manage, OF_TEMPLATE)]),
    rule("/externalscaler.ExternalScaler/IsActive", &[need(View, OF_SCALER)]),
    rule("/externalscaler.ExternalScaler/StreamIsActive", &[need(View, OF_SCALER)]),
    rule("/externalscaler.ExternalScaler/GetMetricSpec", &[need(View, OF_SCALER)]),
    rule("/externalscaler.ExternalScaler/GetMetrics", &[need(View, OF_SCALER)]),
    Rule { call: "/grpc.health.v1.Health/Check", needs: Needs::Nothing },
    Rule { call: "/grpc.health.v1.Health/Watch", needs: Needs::Nothing },
    Rule {
        call: "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        needs: Needs::AnyToken,
    },
    Rule {
        call: "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        needs: Needs::AnyToken,
    },
    Rule { call: "/healthz", needs: Needs::Nothing },
    Rule { call: "/readyz", needs: Needs::Nothing },
    rule("/metrics", &[need(View, EVERYTHING)]),
];

/// The calls that only read, and whose answers may be large.
const LARGE_READS: [&str; 7] = [
    "/sluicegate.v1.AdminService/ListItems",
    "/sluicegate.v1.AdminService/GetItem",
    "/sluicegate.v1.AdminService/ListQueues",
    "/sluicegate.v1.AdminService/ListConsumers",
    "/sluicegate.v1.ScheduleService/ListSchedules",
    "/sluicegate.v1.OperationService/ListOperations",
    "/sluicegate.v1.TemplateService/ListTemplates",
];

/// The calls that are streams.
const STREAMS: [&str; 8] = [
    "/sluicegate.v1.QueueService/PushStream",
    "/sluicegate.v1.QueueService/Consume",
    "/sluicegate.v1.QueueService/ConsumeStream",
    "/sluicegate.v1.AdminService/WatchQueues",
    "/externalscaler.ExternalScaler/StreamIsActive",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, fmt::Write as _, fs, path::Path};

    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    /// Returns the paths of all methods of a descriptor set, and whether each is a stream.
    fn methods(descriptors: &[u8]) -> Vec<(String, bool)> {
        let set = FileDescriptorSet::decode(descriptors).unwrap();
        let mut methods = Vec::new();
        for file in &set.file {
            for service in &file.service {
                for method in &service.method {
                    let is_stream = method.client_streaming() || method.server_streaming();
                    let (service, method) = (service.name(), method.name());
                    methods.push((format!("/{}.{service}/{method}", file.package()), is_stream));
                }
            }
        }
        methods
    }

    #[test]
    fn every_method_that_is_served_has_a_rule_and_every_rule_a_call() {
        let mut served: HashSet<String> =
            ["/healthz", "/readyz", "/metrics"].map(str::to_owned).into();
        for descriptors in [
            sluicegate_proto::FILE_DESCRIPTOR_SET,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        ] {
            for (method, is_stream) in methods(descriptors) {
                assert_eq!(Rule::is_stream(&method), is_stream, "{method}");
                served.insert(method);
            }
        }
        let ruled: HashSet<String> = RULES.iter().map(|rule| rule.call.to_owned()).collect();
        assert_eq!(ruled.len(), RULES.len(), "one rule for each call");
        assert_eq!(served, ruled);
    }

    /// Returns the table as it stands in the documentation.
    fn table() -> String {
        let mut text = String::from("| call | permission | on |\n|---|---|---|\n");
        for rule in RULES {
            let mut parts = rule.call.rsplit('/');
            let (method, service) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
            let call = match service.rsplit('.').next() {
                Some("") | None => format!("HTTP `/{method}`"),
                Some("ServerReflection") => {
                    format!("`{}`", rule.call.trim_start_matches('/'))
                }
                Some(service) => format!("`{service}/{method}`"),
            };
            let mut line = |call: &str, needs: &str, on: &str| {
                writeln!(text, "| {call} | {needs} | {on} |").unwrap();
            };
            match rule.needs {
                Needs::Nothing => line(&call, "none", ""),
                Needs::AnyToken => line(&call, "any valid token", ""),
                Needs::Permissions(needs) => {
                    for (place, need) in needs.iter().enumerate() {
                        let call = if place == 0 { call.as_str() } else { "" };
                        line(call, &format!("`{}`", need.action), need.on);
                    }
                }
            }
        }
        text
    }

    /// To write the table anew: `SLUICEGATE_TEST_WRITE_DOCS=1 cargo test -p sluicegate-broker --lib access::rules`.
    #[test]
    fn the_documentation_has_this_table() {
        const BEGIN: &str = "<!-- begin: generated from broker/src/access/rules.rs -->\n";
        const END: &str = "<!-- end: generated -->\n";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ACCESS.md");
        let text = fs::read_to_string(&path).unwrap();
        let (before, rest) = text.split_once(BEGIN).unwrap();
        let (there, after) = rest.split_once(END).unwrap();
        let expected = table();
        if std::env::var_os("SLUICEGATE_TEST_WRITE_DOCS").is_some() {
            fs::write(&path, format!("{before}{BEGIN}{expected}{END}{after}")).unwrap();
            return;
        }
        assert!(
            there == expected,
            "docs/ACCESS.md is not as the rules are; see this test's comment"
        );
    }
}
