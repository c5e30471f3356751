//! Requests of KEDA, whose metadata is text.

use std::{collections::HashMap, ops::RangeInclusive};

use crate::domain::{Invalid, QueueName};

/// What the metadata of a ScaledObject says.
#[derive(Debug, PartialEq)]
pub(in crate::grpc) struct Scaler {
    /// The queue whose consumers are scaled.
    pub(in crate::grpc) queue: QueueName,
    /// How many items one replica takes on.
    pub(in crate::grpc) target_ready: f64,
    /// For each so many seconds that the oldest item has waited there is one replica; `None`: its age does not matter.
    pub(in crate::grpc) target_age_seconds: Option<f64>,
}

/// A figure of a queue by which its consumers are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::grpc) enum Figure {
    /// The number of items that are ready or reserved.
    Ready,
    /// How many seconds the oldest ready item has been ready.
    AgeSeconds,
}

impl Figure {
    /// Returns the name by which KEDA asks for it.
    pub(in crate::grpc) fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::AgeSeconds => "age_seconds",
        }
    }
}

/// Parses the metadata of a ScaledObject, in which KEDA sends all that it has.
pub(in crate::grpc) fn scaler(metadata: &HashMap<String, String>) -> Result<Scaler, Invalid> {
    let queue = metadata.get("queue").map_or("", String::as_str);
    Ok(Scaler {
        queue: QueueName::parse("scalerMetadata.queue", queue)?,
        target_ready: target(metadata, "targetReady")?
            .ok_or_else(|| Invalid::new("scalerMetadata.targetReady", "must be given"))?,
        target_age_seconds: target(metadata, "targetAgeSeconds")?,
    })
}

/// Parses the name of a figure.
pub(in crate::grpc) fn figure(name: &str) -> Result<Figure, Invalid> {
    let of_name = |figure: &Figure| figure.name() == name;
    [Figure::Ready, Figure::AgeSeconds].into_iter().find(of_name).ok_or_else(|| {
        Invalid::new("metricName", "not a figure of this broker: ready or age_seconds")
    })
}

/// Parses a target that may be left out.
fn target(metadata: &HashMap<String, String>, key: &str) -> Result<Option<f64>, Invalid> {
    // KEDA counts in thousandths.
    const VALID: RangeInclusive<f64> = 0.001..=1e12;
    let Some(text) = metadata.get(key) else { return Ok(None) };
    match text.parse() {
        Ok(target) if VALID.contains(&target) => Ok(Some(target)),
        _ => Err(Invalid::new(
            format!("scalerMetadata.{key}"),
            "not a number from 0.001 to 1,000,000,000,000",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(entries: &[(&str, &str)]) -> HashMap<String, String> {
        entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn metadata_names_a_queue_and_its_targets() {
        let all = [("queue", "orders"), ("targetReady", "2.5"), ("targetAgeSeconds", "60")];
        let parsed = scaler(&metadata(&all)).unwrap();
        assert_eq!((parsed.queue.as_str(), parsed.target_ready), ("orders", 2.5));
        assert_eq!(parsed.target_age_seconds, Some(60.0));
        let most = [("queue", "orders"), ("targetReady", "1"), ("scalerAddress", "broker:7400")];
        assert_eq!(scaler(&metadata(&most)).unwrap().target_age_seconds, None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let field = |entries: &[(&str, &str)]| scaler(&metadata(entries)).unwrap_err().field;
        assert_eq!(field(&[("targetReady", "1")]), "scalerMetadata.queue");
        assert_eq!(field(&[("queue", "a b"), ("targetReady", "1")]), "scalerMetadata.queue");
        assert_eq!(field(&[("queue", "q")]), "scalerMetadata.targetReady");
        for bad in ["", "0", "-1", "ten", "NaN", "inf", "1e13", "0.0001", "1 "] {
            let ready = [("queue", "q"), ("targetReady", bad)];
            assert_eq!(field(&ready), "scalerMetadata.targetReady", "{bad:?}");
            let age = [("queue", "q"), ("targetReady", "1"), ("targetAgeSeconds", bad)];
            assert_eq!(field(&age), "scalerMetadata.targetAgeSeconds", "{bad:?}");
        }
    }

    #[test]
    fn figures_have_names() {
        for name in ["ready", "age_seconds"] {
            assert_eq!(figure(name).map(Figure::name), Ok(name));
        }
        assert_eq!(figure("s0-ready").unwrap_err().field, "metricName");
    }
}
