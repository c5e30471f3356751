//! Histories of several processes in files.

use std::{fs, io::Write, time::SystemTime};

use sluicegate_checker::{
    Options, Recorder, Rule, check_files,
    history::{Answer, Outcome, Response, read_merged},
};

use crate::story::{commit, delivery, item, push, pushed, reserve};

#[test]
fn the_files_of_several_processes_are_one_history() {
    let directory = tempfile::tempdir().expect("a directory");
    let paths = ["producer", "consumer"].map(|name| directory.path().join(name));
    let producer = Recorder::to_file(&paths[0], 1).expect("a file");
    let consumer = Recorder::to_file(&paths[1], 2).expect("a file");
    let call = producer.start("p", "one", push(vec![item("a")]));
    call.ok(Response::Pushed(vec![pushed("a")]));
    let mut first = delivery("a", 1);
    first.lease_end = consumer.time_of(SystemTime::now()) + 60_000_000;
    consumer.start("c", "two", reserve(1, 0)).ok(Response::Deliveries(vec![first]));
    // A call that is dropped has an unknown outcome.
    drop(producer.start("p", "one", push(vec![item("b")])));
    consumer.start("c", "two", commit("a/1")).end(Answer::Ok(Response::Settled(vec![Outcome::Ok])));
    producer.flush().expect("written");
    consumer.flush().expect("written");
    // The last line of a process that was killed is cut.
    let mut file = fs::OpenOptions::new().append(true).open(&paths[1]).expect("the file");
    file.write_all(b"{\"at\":").expect("written");

    let paths = [paths[0].as_path(), paths[1].as_path()];
    let report = check_files(&paths, &Options::default()).expect("histories");
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.events, 8);
    let events: Vec<_> = read_merged(&paths).expect("histories").map(Result::unwrap).collect();
    assert!(events.is_sorted_by_key(|event| event.at));
    let again = events.iter().map(|event| serde_json::to_string(event).expect("JSON"));
    let again: Vec<_> = again.map(|line| serde_json::from_str(&line).expect("an event")).collect();
    assert_eq!(events, again);

    // One file alone is the history of items from nowhere.
    let report = check_files(&paths[1..], &Options::default()).expect("a history");
    assert_eq!(report.rules(), [Rule::Invented]);
    assert_eq!(report.violations[0].evidence.len(), 1, "{report}");
}
