//! Where spans and metrics are sent.

use std::{fs, time::Duration};

use axum::http::{Uri, uri::Scheme};
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};

use super::{
    ConfigError,
    checks::span,
    sources::Given,
    values::{self, Parsed},
};

/// A collector of spans and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Otlp {
    /// Its address, `http` or, over gRPC, `https`.
    pub endpoint: String,
    /// The certificates, as PEM, of the authorities one of which its own must be from; `None`: the public ones.
    pub authorities: Option<String>,
    /// What it speaks.
    pub protocol: OtlpProtocol,
    /// How often metrics are sent; `None`: never.
    pub metrics_interval: Option<Duration>,
}

/// How spans and metrics are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtlpProtocol {
    /// gRPC.
    Grpc,
    /// Protobuf over HTTP.
    Http,
}

impl Given {
    pub(super) fn otlp(&self) -> Result<Option<Otlp>, ConfigError> {
        let protocol = self.required("otlp_protocol", |text| match text {
            "grpc" => Ok(OtlpProtocol::Grpc),
            "http" => Ok(OtlpProtocol::Http),
            _ => Err(format!("{text:?} is neither grpc nor http")),
        })?;
        let metrics_interval = self.required("otlp_metrics_interval", |text| {
            if values::duration(text)?.is_zero() {
                return Ok(None);
            }
            span(Duration::from_secs(1), Duration::from_hours(1))(text).map(Some)
        })?;
        let endpoint = self.optional("otlp_endpoint", |text| endpoint(text, protocol))?;
        let authorities = self.optional("otlp_ca", authorities)?;
        let is_https = endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("https:"));
        if authorities.is_some() && !is_https {
            let problem = "it needs an otlp_endpoint of https beside it";
            return Err(self.bad("otlp_ca", problem.to_owned()));
        }
        Ok(endpoint.map(|endpoint| Otlp { endpoint, authorities, protocol, metrics_interval }))
    }
}

/// Reads certificates. A file without one would let no collector be known.
fn authorities(path: &str) -> Parsed<String> {
    let text = fs::read(path).map_err(|error| format!("{path:?} cannot be read: {error}"))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        // Certificates are ASCII; what is around them may be anything.
        Ok(certificates) if !certificates.is_empty() => {
            Ok(String::from_utf8_lossy(&text).into_owned())
        }
        Ok(_) => Err(format!("{path:?} has no certificate in it")),
        Err(error) => Err(format!("{path:?} is not usable: {error}")),
    }
}

fn endpoint(text: &str, protocol: OtlpProtocol) -> Parsed<String> {
    if cfg!(not(feature = "otlp")) {
        return Err("this broker was built without the feature otlp".to_owned());
    }
    let uri: Option<Uri> = text.parse().ok();
    let uri = uri.filter(|uri| uri.host().is_some_and(|host| !host.is_empty()));
    match uri.as_ref().and_then(Uri::scheme) {
        Some(scheme) if *scheme == Scheme::HTTP => Ok(text.to_owned()),
        Some(scheme) if *scheme == Scheme::HTTPS && protocol == OtlpProtocol::Grpc => {
            Ok(text.to_owned())
        }
        Some(scheme) if *scheme == Scheme::HTTPS => {
            Err("https needs otlp_protocol = grpc".to_owned())
        }
        _ => Err(format!("{text:?} is no address; write for example http://127.0.0.1:4317")),
    }
}
