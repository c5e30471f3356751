//! How long a call may take: its header `grpc-timeout`, up to eight digits and a unit.

use std::time::Duration;

use tonic::codegen::http::HeaderMap;

/// Returns how long the caller of a call with these headers waits for its answer, or for the beginning of a stream of answers;
/// `None`: as long as it takes.
pub fn deadline(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None; // gRPC has no more
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3_600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use tonic::codegen::http::HeaderValue;

    use super::*;

    #[test]
    fn deadlines_are_read_with_their_units() {
        let of = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", HeaderValue::from_static(text));
            deadline(&headers)
        };
        assert_eq!(of("2H"), Some(Duration::from_secs(7_200)));
        assert_eq!(of("3M"), Some(Duration::from_secs(180)));
        assert_eq!(of("4S"), Some(Duration::from_secs(4)));
        assert_eq!(of("5m"), Some(Duration::from_millis(5)));
        assert_eq!(of("6u"), Some(Duration::from_micros(6)));
        assert_eq!(of("7n"), Some(Duration::from_nanos(7)));
        assert_eq!((of("S"), of("1x"), of("")), (None, None, None));
        assert_eq!(deadline(&HeaderMap::new()), None);
    }
}
