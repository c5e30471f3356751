//! Operations on set members, applied in any order, end with the same document. Needs a real MongoDB:
//! `SLUICEGATE_TEST_MONGODB_URI`.

use std::collections::BTreeMap;

use mongodb::{
    Client, Collection,
    bson::{Bson, Document, doc},
};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};
use sluicegate_client::apply::{
    Applied,
    Change::{self, Insert, Remove},
    SetField,
};

type Operation = (Change, &'static str, i64);

async fn connect() -> Client {
    let uri = std::env::var("SLUICEGATE_TEST_MONGODB_URI").expect(
        "this test needs a real MongoDB: set SLUICEGATE_TEST_MONGODB_URI, for example to mongodb://127.0.0.1:27017",
    );
    Client::with_uri_str(uri).await.expect("SLUICEGATE_TEST_MONGODB_URI must be a valid URI")
}

/// A collection of its own for each test.
async fn collection(name: &str) -> Collection<Document> {
    let collection = connect().await.database("sluicegate_apply_test").collection(name);
    collection.drop().await.expect("MongoDB must be reachable");
    collection
}

async fn document(collection: &Collection<Document>, id: Bson) -> Document {
    let mut found = collection.find_one(doc! { "_id": &id }).await.unwrap().expect("the document");
    found.remove("_id");
    found
}

/// All orders of `0..n` (Heap's algorithm).
fn permutations(n: usize) -> Vec<Vec<usize>> {
    fn visit(k: usize, order: &mut Vec<usize>, all: &mut Vec<Vec<usize>>) {
        if k <= 1 {
            all.push(order.clone());
            return;
        }
        for i in 0..k {
            visit(k - 1, order, all);
            order.swap(if k.is_multiple_of(2) { i } else { 0 }, k - 1);
        }
    }
    let mut all = Vec::new();
    visit(n, &mut (0..n).collect(), &mut all);
    all
}

/// What the document must be: for each member the operation with the highest number counts.
fn expected(operations: &[Operation]) -> Document {
    let mut last: BTreeMap<&str, (i64, Change)> = BTreeMap::new();
    for &(change, member, seq) in operations {
        let entry = last.entry(member).or_insert((seq, change));
        if seq >= entry.0 {
            *entry = (seq, change);
        }
    }
    let list = |wanted: Change| -> Vec<Bson> {
        last.iter()
            .filter(|(_, (_, change))| *change == wanted)
            .map(|(member, (seq, _))| doc! { "member": *member, "seq": *seq }.into())
            .collect()
    };
    doc! { "students": list(Insert), "students_removed": list(Remove) }
}

/// Applies the operations in each possible order, each order to a document of its own, several at a time.
async fn check_all_orders(collection: &Collection<Document>, operations: &[Operation]) {
    let set = SetField::new(collection.clone(), "students");
    let want = expected(operations);
    for order in permutations(operations.len()) {
        let id = mongodb::bson::oid::ObjectId::new();
        for &at in &order {
            let (change, member, seq) = operations[at];
            set.apply(id, change, member, seq).await.unwrap();
        }
        assert_eq!(
            document(collection, id.into()).await,
            want,
            "order {order:?} of {operations:?}"
        );
    }
}

#[tokio::test]
async fn three_and_four_operations_on_one_member_have_the_same_result_in_any_order() {
    let collection = collection("one_member").await;
    check_all_orders(&collection, &[(Insert, "ann", 1), (Remove, "ann", 2), (Insert, "ann", 3)])
        .await;
    check_all_orders(
        &collection,
        &[(Insert, "ann", 1), (Remove, "ann", 2), (Insert, "ann", 3), (Remove, "ann", 9)],
    )
    .await;
}

#[test]
fn any_operations_have_the_same_result_in_any_order() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let collection = runtime.block_on(collection("property"));
    let change = prop_oneof![Just(Insert), Just(Remove)];
    let members = prop_oneof![Just("ann"), Just("bob"), Just("$cid.x")];
    let operations = vec((change, members), 1..=5).prop_map(|operations| {
        // The queue's numbers: unique, in order of the pushes.
        (1..)
            .zip(operations)
            .map(|(seq, (change, member))| (change, member, seq))
            .collect::<Vec<_>>()
    });
    let mut runner =
        TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    runner
        .run(&operations, |operations| {
            runtime.block_on(check_all_orders(&collection, &operations));
            Ok(())
        })
        .unwrap();
}

#[tokio::test]
async fn a_repeated_or_older_operation_is_stale_and_changes_nothing() {
    let collection = collection("stale").await;
    let set = SetField::new(collection.clone(), "students");
    assert_eq!(set.apply("c", Remove, "ann", 5).await.unwrap(), Applied::Changed);
    let before = document(&collection, "c".into()).await;
    assert_eq!(set.apply("c", Remove, "ann", 5).await.unwrap(), Applied::Stale);
    assert_eq!(set.apply("c", Insert, "ann", 4).await.unwrap(), Applied::Stale);
    assert_eq!(document(&collection, "c".into()).await, before);
    assert_eq!(set.apply("c", Insert, "ann", 6).await.unwrap(), Applied::Changed);
}

#[tokio::test(flavor = "multi_thread")]
async fn racing_consumers_end_with_the_same_document() {
    let collection = collection("racing").await;
    let operations: Vec<Operation> = (1..=40)
        .map(|seq| {
            (
                if seq % 3 == 0 { Remove } else { Insert },
                ["ann", "bob", "cid"][seq as usize % 3],
                seq,
            )
        })
        .collect();
    let want = expected(&operations);
    for round in 0..5 {
        let mut tasks = tokio::task::JoinSet::new();
        // All concurrently, including the first upserts of the document.
        for &(change, member, seq) in &operations {
            let set = SetField::new(collection.clone(), "students");
            tasks.spawn(async move { set.apply(round, change, member, seq).await.unwrap() });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        assert_eq!(document(&collection, round.into()).await, want);
    }
}

#[tokio::test]
async fn forgetting_drops_only_older_tombstones() {
    let collection = collection("forget").await;
    let set = SetField::new(collection.clone(), "students");
    for (member, seq) in [("ann", 1), ("bob", 2), ("cid", 3)] {
        set.apply("c", Remove, member, seq).await.unwrap();
    }
    assert_eq!(set.forget_removed(3).await.unwrap(), 1);
    let want = doc! { "students": [], "students_removed": [{ "member": "cid", "seq": 3_i64 }] };
    assert_eq!(document(&collection, "c".into()).await, want);
}
