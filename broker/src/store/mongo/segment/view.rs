//! The view `items_flat.<group>`: `items.<group>` with each item of a segment as a document of its own, for people who
//! read the database.

use mongodb::bson::{Bson, Document, doc};

use crate::store::{
    Result,
    mongo::{
        schema::layout::{LEASED, live},
        segment::document::WORD,
        server::{error::failed, places::Db, time_limit::in_time},
    },
};

/// The server's code for a collection or view that exists.
const EXISTS: i32 = 48;

/// Creates the view of a collection of items, or brings the one that is there up to date.
pub(crate) async fn create(db: &Db, items: &str) -> Result<()> {
    let name = items.replacen("items.", "items_flat.", 1);
    let command = |verb: &str| doc! { verb: &name, "viewOn": items, "pipeline": pipeline() };
    let created = match in_time(db, db.run_command(command("create"))).await {
        Err(error) if is_there(&error) => in_time(db, db.run_command(command("collMod"))).await,
        created => created,
    };
    created.map(|_| ()).map_err(failed)
}

fn is_there(error: &mongodb::error::Error) -> bool {
    matches!(error.kind.as_ref(), mongodb::error::ErrorKind::Command(c) if c.code == EXISTS)
}

fn pipeline() -> Vec<Document> {
    let reserved = doc! { "$first": { "$filter": {
        "input": "$runs", "as": "run", "cond": contains("$$run.items"), "limit": 1,
    } } };
    vec![
        doc! { "$match": { "priority": { "$exists": true }, "when": live() } },
        doc! { "$unwind": {
            "path": "$items", "includeArrayIndex": "at", "preserveNullAndEmptyArrays": true,
        } },
        doc! { "$match": { "$expr": { "$or": [{ "$eq": ["$at", null] }, { "$not": [contains("$done")] }] } } },
        doc! { "$set": { "run": { "$cond": [{ "$eq": ["$at", null] }, "$$REMOVE", reserved] } } },
        doc! { "$set": item() },
        doc! { "$unset": [
            "at", "run", "items", "n", "head", "ready", "left", "done", "runs", "lapse",
        ] },
    ]
}

/// What an item of a segment would have in a document of its own. Stages that set single fields let the server apply a
/// filter by queue to the index, before it computes the view.
fn item() -> Document {
    let of_run =
        |field: &str| Bson::from(doc! { "$ifNull": [format!("$run.{field}"), "$$REMOVE"] });
    let of_item =
        |field: &str| Bson::from(doc! { "$ifNull": [format!("$items.{field}"), "$$REMOVE"] });
    let leased = doc! { "$add": ["$run.until", Bson::Int64(LEASED)] };
    let fields: [(&str, Bson); 13] = [
        ("_id", id().into()),
        ("when", doc! { "$ifNull": [leased, "$created"] }.into()),
        ("attempt", 1.into()),
        ("deliveries", doc! { "$cond": [{ "$gt": ["$run", null] }, 1, 0] }.into()),
        ("lock", of_run("lock")),
        ("started", of_run("started")),
        ("consumer", of_run("consumer")),
        ("dedup", doc! { "$ifNull": [{ "$arrayElemAt": ["$dedup", "$at"] }, "$$REMOVE"] }.into()),
        ("segment", "$_id".into()),
        ("payload", of_item("payload")),
        ("contentType", of_item("contentType")),
        ("headers", of_item("headers")),
        ("producer", of_item("producer")),
    ];
    let or_own = |(field, value): (&str, Bson)| {
        let own = format!("${field}");
        (field.to_owned(), Bson::from(doc! { "$cond": [{ "$eq": ["$at", null] }, own, value] }))
    };
    fields.into_iter().map(or_own).collect()
}

/// Returns an expression: whether the item is in a set, whose words have [`WORD`] bits.
fn contains(set: &str) -> Document {
    let word = doc! { "$arrayElemAt": [set, { "$toInt": { "$floor": { "$divide": ["$at", WORD as i64] } } }] };
    let place = doc! { "$pow": [2_i64, { "$mod": ["$at", WORD as i64] }] };
    doc! { "$eq": [{ "$mod": [{ "$floor": { "$divide": [word, place] } }, 2] }, 1] }
}

/// Returns an expression for the id of the item: that of its segment with the number of the item, counted from 1, in
/// the last ten bits of the eighth byte.
fn id() -> Document {
    const DIGITS: &str = "0123456789abcdef";
    let segment = doc! { "$toString": "$_id" };
    let offset = doc! { "$add": [{ "$toInt": "$at" }, 1] };
    let digit = |value: Document| doc! { "$substrCP": [DIGITS, { "$toInt": value }, 1] };
    let part = |from: i32, count: i32| doc! { "$substrCP": [segment.clone(), from, count] };
    let first = doc! { "$indexOfCP": [DIGITS, part(13, 1)] };
    let by = |divisor: i32| doc! { "$floor": { "$divide": [offset.clone(), divisor] } };
    doc! { "$toObjectId": { "$concat": [
        part(0, 13),
        digit(doc! { "$add": [first, by(256)] }),
        digit(doc! { "$mod": [by(16), 16] }),
        digit(doc! { "$mod": [offset.clone(), 16] }),
        part(16, 8),
    ] } }
}
