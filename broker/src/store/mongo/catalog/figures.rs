//! Past figures of queues: one document for each time and broker, which ends by itself.

use std::time::Duration;

use mongodb::bson::{Document, doc};

use super::reports::create_index;
use crate::{
    domain::Timestamp,
    store::{
        FiguresPlace, KeptFigures, QueueFigures, Result,
        mongo::{
            Inner,
            schema::layout::date,
            server::{connect::read_documents, error::failed, time_limit::in_time},
        },
        reports::{broker_text, parse_broker},
    },
};

const FIGURES: &str = "figures";

/// Returns the `_id` of figures, which sorts as their places do.
fn id(place: &FiguresPlace) -> String {
    format!("{:015}/{:06}/{}", place.time.0, place.step, broker_text(place.broker))
}

pub(crate) async fn keep(inner: &Inner, kept: &KeptFigures, lasting: Duration) -> Result<()> {
    inner.figures_indexed.get_or_try_init(|| create_index(inner, FIGURES)).await?;
    let FiguresPlace { time, step, broker } = kept.place;
    let id = id(&kept.place);
    let queues: Vec<Document> = kept.queues.iter().map(write).collect();
    let document = doc! {
        "_id": &id, "time": date(time), "step": i64::from(step), "broker": broker_text(broker),
        "expires": date(time + lasting), "queues": queues,
    };
    let figures = inner.db.collection::<Document>(FIGURES);
    in_time(&inner.db, figures.replace_one(doc! { "_id": id }, document).upsert(true))
        .await
        .map_err(failed)?;
    Ok(())
}

fn write(figures: &QueueFigures) -> Document {
    doc! {
        "q": &figures.queue, "ready": figures.ready, "delayed": figures.delayed,
        "reserved": figures.reserved, "blocked": figures.blocked, "pushed": figures.pushed,
        "left": figures.left,
    }
}

pub(crate) async fn list(
    inner: &Inner,
    after: Option<FiguresPlace>,
    limit: usize,
) -> Result<Vec<KeptFigures>> {
    let mut filter = doc! { "expires": { "$gt": date(inner.now()) } };
    if let Some(after) = after {
        filter.insert("_id", doc! { "$gt": id(&after) });
    }
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let command = doc! { "find": FIGURES, "filter": filter, "sort": { "_id": 1 }, "limit": limit };
    let found = read_documents(&inner.db, command).await?;
    Ok(found.iter().filter_map(read).collect())
}

fn read(document: &Document) -> Option<KeptFigures> {
    let place = FiguresPlace {
        time: Timestamp(document.get_datetime("time").ok()?.timestamp_millis()),
        step: u32::try_from(document.get_i64("step").ok()?).ok()?,
        broker: parse_broker(document.get_str("broker").ok()?)?,
    };
    let queues = document.get_array("queues").ok()?.iter();
    let queues = queues.filter_map(|figures| read_queue(figures.as_document()?)).collect();
    Some(KeptFigures { place, queues })
}

fn read_queue(document: &Document) -> Option<QueueFigures> {
    let number = |name: &str| document.get_i64(name).ok();
    Some(QueueFigures {
        queue: document.get_str("q").ok()?.to_owned(),
        ready: number("ready")?,
        delayed: number("delayed")?,
        reserved: number("reserved")?,
        blocked: number("blocked")?,
        pushed: number("pushed")?,
        left: number("left")?,
    })
}
