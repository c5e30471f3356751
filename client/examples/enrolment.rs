//! Students enrol in classes and leave them; eight consumers apply that to MongoDB in whatever order it reaches
//! them, and each class ends with the right students. Needs a broker and a MongoDB:
//!
//! ```text
//! cargo run -p sluicegate-client --features mongodb --example enrolment [URL] [MONGODB_URI]
//! ```

use std::time::Duration;

use mongodb::bson::{Document, doc};
use serde::{Deserialize, Serialize};
use sluicegate_client::{
    Client, Error, NewItem,
    apply::{Change, SetField},
    proto::{CreateQueueRequest, Queue},
};

#[derive(Debug, Serialize, Deserialize)]
struct Enrolment {
    student: String,
    class: String,
    leaves: bool,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().unwrap_or_else(|| "http://127.0.0.1:7400".to_owned());
    let uri = arguments.next().unwrap_or_else(|| "mongodb://127.0.0.1:27017".to_owned());
    let client = Client::connect(url).await?;
    let classes = mongodb::Client::with_uri_str(uri)
        .await?
        .database("school")
        .collection::<Document>("classes");

    // `sequenced` numbers the items in the order of their pushes.
    let queue = Queue { name: "example.enrolments".into(), sequenced: true, ..Default::default() };
    let request = CreateQueueRequest { queue: Some(queue) };
    client.admin_service().create_queue(request).await.map_err(Error::from)?;

    let producer = client.producer("example.enrolments").with_auto_dedup();
    let mut items = Vec::new();
    for turn in 0..9 {
        for student in ["ann", "bob", "cid", "dan"] {
            let class = ["algebra", "botany"][usize::from(student > "bob")].to_owned();
            let leaves = turn % 2 == 1 || (turn == 8 && student == "dan");
            items.push(NewItem::json(&Enrolment { student: student.into(), class, leaves })?);
        }
    }
    producer.push_all(items).await?;

    let set = SetField::new(classes.clone(), "students");
    client
        .consumer("example.enrolments")
        .max_in_flight(8)
        .idle_exit(Duration::from_secs(1))
        .run(move |delivery| {
            let set = set.clone();
            async move {
                let Enrolment { student, class, leaves } = delivery.json()?;
                let change = if leaves { Change::Remove } else { Change::Insert };
                let applied = set.apply(&class, change, &student, delivery.sequence()).await?;
                println!("{:>3} {student} {change:?} {class}: {applied:?}", delivery.sequence());
                Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
            }
        })
        .await?;

    for class in ["algebra", "botany"] {
        println!("{}", classes.find_one(doc! { "_id": class }).await?.unwrap_or_default());
    }
    Ok(())
}
