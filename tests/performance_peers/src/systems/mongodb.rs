//! The driver of MongoDB alone: one durable insert of one document per item.

use ::mongodb::{
    Client, Collection,
    bson::{Binary, Document, doc, spec::BinarySubtype},
    options::{Acknowledgment, CollectionOptions, WriteConcern},
};
use anyhow::{Result, bail};
use async_trait::async_trait;
use bytes::Bytes;

use super::{Address, Confirmation, Consumer, Producer, System};

pub(super) struct MongoDb(Collection<Document>);

impl MongoDb {
    pub(super) async fn new(address: Address) -> Result<Self> {
        let database = Client::with_uri_str(address.push).await?.database("peers");
        let durable = WriteConcern::builder().w(Acknowledgment::Majority).journal(true).build();
        let options = CollectionOptions::builder().write_concern(durable).build();
        Ok(Self(database.collection_with_options("items", options)))
    }
}

#[async_trait]
impl System for MongoDb {
    async fn producer(&self) -> Result<Box<dyn Producer>> {
        Ok(Box::new(Inserts(self.0.clone())))
    }

    async fn callers(&self, n: usize) -> Result<Vec<Box<dyn Producer>>> {
        Ok((0..n).map(|_| Box::new(Inserts(self.0.clone())) as _).collect())
    }

    async fn consumer(&self, _prefetch: u16) -> Result<Box<dyn Consumer>> {
        bail!("the driver alone only inserts")
    }

    async fn workers(&self, _n: usize) -> Result<Vec<Box<dyn Consumer>>> {
        bail!("the driver alone only inserts")
    }
}

struct Inserts(Collection<Document>);

#[async_trait]
impl Producer for Inserts {
    async fn send(&mut self, payloads: Vec<Bytes>) -> Result<Confirmation> {
        let items = self.0.clone();
        let document = |payload: Bytes| {
            let payload = Binary { subtype: BinarySubtype::Generic, bytes: payload.into() };
            doc! { "payload": payload }
        };
        let documents: Vec<Document> = payloads.into_iter().map(document).collect();
        Ok(Box::pin(async move { Ok(items.insert_many(documents).await.map(drop)?) }))
    }
}
