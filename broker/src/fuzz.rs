//! Fuzzing of what reads what others have written: receipts, names, page tokens, signals, stored documents, requests.
//!
//! Each target is a test. It takes the kept inputs of `broker/corpus/TARGET`, and then inputs made at random, the same
//! ones each time. With `SLUICEGATE_FUZZ_SECONDS` it makes other inputs for as long. An input that a target fails with is
//! made as small as possible and kept, to be added to the repository with the mend.

use std::{
    env, fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use proptest::{
    collection::vec,
    prelude::*,
    sample::{Index, select},
    test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner},
};
use rustix::time::{ClockId, clock_gettime};

/// Number of inputs made at random in a run of all tests.
const CASES: u32 = 1_000;
/// Number of inputs between two looks at the clock.
const ROUND: u32 = 200;
/// Processor time in which an input must be done with. What takes longer can hold a broker up.
const LIMIT: Duration = Duration::from_secs(2);
/// Pause between two lines of progress.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// A change of an input.
#[derive(Debug, Clone)]
enum Change {
    Flip(Index, u8),
    Set(Index, Vec<u8>),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Repeat(Index, usize),
}

impl Change {
    fn apply(self, mut input: Vec<u8>) -> Vec<u8> {
        let at = |index: Index, input: &[u8]| index.index(input.len() + 1);
        match self {
            Self::Flip(_, _) if input.is_empty() => {}
            Self::Flip(index, bit) => {
                let at = index.index(input.len());
                input[at] ^= 1 << bit;
            }
            Self::Set(index, bytes) => {
                let at = at(index, &input);
                let room = bytes.len().min(input.len() - at);
                input[at..][..room].copy_from_slice(&bytes[..room]);
            }
            Self::Insert(index, bytes) => {
                let at = at(index, &input);
                input.splice(at..at, bytes);
            }
            Self::Remove(index, count) => {
                let at = at(index, &input);
                let end = (at + count).min(input.len());
                input.drain(at..end);
            }
            Self::Repeat(index, count) => {
                let at = at(index, &input);
                let part = input[at..(at + count).min(input.len())].to_vec();
                input.splice(at..at, part);
            }
        }
        input
    }
}

fn change() -> impl Strategy<Value = Change> {
    let bytes = || {
        prop_oneof![
            vec(any::<u8>(), 1..9),
            select(vec![
                vec![0; 8],
                vec![0xff; 8],
                vec![0x7f; 8],
                vec![0x80; 8],
                vec![0xff; 4],
                vec![0]
            ]),
            "[0-9a-z._ /-]{1,12}".prop_map(String::into_bytes),
        ]
    };
    let at = any::<Index>;
    prop_oneof![
        3 => (at(), 0..8_u8).prop_map(|(index, bit)| Change::Flip(index, bit)),
        3 => (at(), bytes()).prop_map(|(index, bytes)| Change::Set(index, bytes)),
        2 => (at(), bytes()).prop_map(|(index, bytes)| Change::Insert(index, bytes)),
        1 => (at(), 1..40_usize).prop_map(|(index, count)| Change::Remove(index, count)),
        1 => (at(), 1..40_usize).prop_map(|(index, count)| Change::Repeat(index, count)),
    ]
}

/// Returns inputs with up to five changes.
pub(crate) fn changed(inputs: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    (inputs, vec(change(), 0..6))
        .prop_map(|(input, changes)| changes.into_iter().fold(input, |input, one| one.apply(input)))
}

/// Returns arbitrary inputs, and such that differ a little from one of `good`.
pub(crate) fn near(good: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![1 => vec(any::<u8>(), 0..200), 9 => changed(select(good))]
}

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// Runs `target`, which panics if something is wrong, with the kept inputs and with others.
pub(crate) fn fuzz(name: &str, inputs: &impl Strategy<Value = Vec<u8>>, target: impl Fn(&[u8])) {
    let target = |input: &[u8]| {
        let before = processor_time();
        target(input);
        let took = processor_time().saturating_sub(before);
        assert!(took < LIMIT, "it took {took:?}");
    };
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    for kept in fs::read_dir(&folder).into_iter().flatten() {
        let path = kept.expect("an input").path();
        println!("{}", path.display()); // shown if the target fails with it
        target(&fs::read(path).expect("an input"));
    }
    let run = |runner: &mut TestRunner| {
        let found = runner.run(inputs, |input| {
            target(&input);
            Ok(())
        });
        match found {
            Ok(()) => {}
            Err(TestError::Fail(why, input)) => {
                let path = folder.join(format!("{:08x}", crc32fast::hash(&input)));
                fs::create_dir_all(&folder)
                    .and_then(|()| fs::write(&path, &input))
                    .expect("a file");
                panic!("{why}; the input is kept in {}", path.display());
            }
            Err(TestError::Abort(why)) => panic!("{why}"),
        }
    };
    let config = |cases| Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    run(&mut TestRunner::new_with_rng(config(CASES), rng));
    let Some(seconds) = env::var("SLUICEGATE_FUZZ_SECONDS").ok() else { return };
    let limit = Duration::from_secs(seconds.parse().expect("a number of seconds"));
    let (begun, mut told, mut count) = (Instant::now(), Instant::now(), 0);
    while begun.elapsed() < limit {
        run(&mut TestRunner::new(config(ROUND)));
        count += u64::from(ROUND);
        if told.elapsed() > TELL_EVERY {
            told = Instant::now();
            eprintln!("fuzz {name}: {count} inputs in {:.0?}", begun.elapsed());
        }
    }
    eprintln!("fuzz {name}: {count} inputs in {:.0?}, nothing found", begun.elapsed());
}

#[test]
fn changes_fit_inputs_of_any_length() {
    let mut runner = TestRunner::deterministic();
    let inputs = changed(vec(any::<u8>(), 0..4));
    let is_short = |input: Vec<u8>| {
        assert!(input.len() < 300);
        Ok(())
    };
    runner.run(&inputs, is_short).unwrap();
}
