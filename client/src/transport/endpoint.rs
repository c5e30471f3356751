//! How an address is reached.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};
use tonic::codegen::{
    StdError,
    http::{
        Uri,
        uri::{Authority, Scheme},
    },
};

/// An address, and how to connect to it.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    /// Where to connect to.
    pub(super) to: Uri,
    /// What calls name as their server: a proxy may need the host of the URL.
    pub(super) scheme: Scheme,
    pub(super) authority: Authority,
    pub(super) tls: Option<Tls>,
    pub(super) connect_timeout: Duration,
    pub(super) keep_alive: Duration,
}

impl Endpoint {
    /// Returns the endpoint of a URL, at one address of its host or at any.
    ///
    /// # Errors
    /// What is wrong with the URL.
    pub(crate) fn new(
        url: Uri,
        at: Option<SocketAddr>,
        tls: Option<Tls>,
        connect_timeout: Duration,
        keep_alive: Duration,
    ) -> Result<Self, StdError> {
        let authority = url.authority().ok_or("it has no host")?.clone();
        let scheme = url.scheme().unwrap_or(&Scheme::HTTP).clone();
        let to = match at {
            None => url,
            Some(at) => format!("{scheme}://{at}").parse()?,
        };
        Ok(Self { to, scheme, authority, tls, connect_timeout, keep_alive })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.to.authority().unwrap_or(&self.authority))
    }
}

/// What TLS connections need.
#[derive(Clone)]
pub(crate) struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Tls {
    /// Returns how to connect to a server of this name, which one of the authorities in the PEM text `ca`, or else one of those that
    /// Mozilla trusts, has certified. `identity`: the certificate and the key to present, as PEM texts.
    ///
    /// # Errors
    /// What is wrong with the certificates, the key or the name.
    pub(crate) fn new(
        name: &str,
        ca: Option<&str>,
        identity: Option<(&str, &str)>,
    ) -> Result<Self, StdError> {
        let mut roots = RootCertStore::empty();
        match ca {
            Some(pem) => _ = roots.add_parsable_certificates(certificates(pem)?),
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let mut config = match identity {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => config.with_client_auth_cert(
                certificates(certificate)?,
                PrivateKeyDer::from_pem_slice(key.as_bytes())
                    .map_err(|error| format!("the private key cannot be used: {error}"))?,
            )?,
        };
        config.alpn_protocols.push(b"h2".to_vec());
        Ok(Self { config: Arc::new(config), name: ServerName::try_from(name.to_owned())? })
    }

    /// Does the handshake on a connection.
    pub(super) async fn connect<S>(&self, stream: S) -> Result<TlsStream<S>, StdError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let connector = TlsConnector::from(Arc::clone(&self.config));
        let stream = connector.connect(self.name.clone(), stream).await?;
        if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err("the server does not speak HTTP/2".into());
        }
        Ok(stream)
    }
}

fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, StdError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let found = found.map_err(|error| format!("the certificates cannot be used: {error}"))?;
    if found.is_empty() { Err("there is no certificate in the PEM text".into()) } else { Ok(found) }
}
