//! TLS on connections. The task that serves a connection does the handshake when it first reads or
//! writes, so that a slow client does not delay others.

use std::{
    error::Error,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
};
use tokio_rustls::{
    Accept, TlsAcceptor,
    rustls::{
        self, RootCertStore, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
        server::{VerifierBuilderError, WebPkiClientVerifier},
    },
    server::TlsStream,
};

use crate::{
    access::{Access, Peer},
    config::Tls,
};

/// The reason why TLS cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A file has the wrong content.
    #[error("{path} is not usable: {source}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: pem::Error,
    },
    /// The certificate and the key cannot be used, for example because they do not belong together.
    #[error("the TLS certificate and key cannot be used: {0}")]
    Identity(#[from] rustls::Error),
    /// The authorities of clients cannot be used.
    #[error("the authorities of client certificates cannot be used: {0}")]
    ClientAuthority(#[from] VerifierBuilderError),
}

/// Reads the files and checks that they can be used.
pub(crate) fn acceptor(tls: &Tls) -> Result<TlsAcceptor, TlsError> {
    let certificates = certificates(&tls.cert)?;
    let key = PrivateKeyDer::from_pem_slice(&read(&tls.key)?)
        .map_err(|source| TlsError::Pem { path: tls.key.clone(), source })?;
    let provider = Arc::new(ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?;
    let config = match &tls.client_ca {
        None => config.with_no_client_auth(),
        Some(path) => {
            let mut authorities = RootCertStore::empty();
            authorities.add_parsable_certificates(self::certificates(path)?);
            let authorities = Arc::new(authorities);
            let verifier = WebPkiClientVerifier::builder_with_provider(authorities, provider);
            let verifier =
                if tls.certificate_required { verifier } else { verifier.allow_unauthenticated() };
            config.with_client_cert_verifier(verifier.build()?)
        }
    };
    let mut config = config.with_single_cert(certificates, key)?;
    config.alpn_protocols.push(b"h2".to_vec());
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(path)?;
    let unusable = |source| TlsError::Pem { path: path.to_owned(), source };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(unusable)?;
    if found.is_empty() { Err(unusable(pem::Error::NoItemsFound)) } else { Ok(found) }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

/// What TLS handshakes need.
#[derive(Clone)]
pub(crate) struct Handshakes {
    /// Each handshake uses what this is when it begins.
    pub(crate) acceptor: watch::Receiver<TlsAcceptor>,
    /// Counts those that fail, so that they do not fill the log.
    pub(crate) access: Arc<Access>,
}

/// What carries the bytes of a connection.
pub(super) enum Transport {
    Plain(TcpStream),
    /// The TLS handshake is not complete yet.
    Handshake(Box<Accept<TcpStream>>, Peer, Arc<Access>),
    Tls(Box<TlsStream<TcpStream>>),
    /// The TLS handshake failed.
    Failed,
}

/// Both directions of one connection.
pub(super) trait Io: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Io for T {}

impl Transport {
    /// The names in the peer's certificate are put into `peer` when the handshake is complete.
    pub(super) fn new(stream: TcpStream, tls: Option<&Handshakes>, peer: &Peer) -> Self {
        let Some(Handshakes { acceptor, access }) = tls else { return Self::Plain(stream) };
        let handshake = acceptor.borrow().accept(stream);
        Self::Handshake(Box::new(handshake), peer.clone(), Arc::clone(access))
    }

    /// Returns what to read from and to write to, once the TLS handshake is complete.
    pub(super) fn poll_ready(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut dyn Io>>> {
        if let Self::Handshake(handshake, peer, access) = self {
            match ready!(Pin::new(handshake.as_mut()).poll(context)) {
                Ok(stream) => {
                    // Set once: there is one handshake.
                    let _ = peer.names.set(names(&stream));
                    *self = Self::Tls(Box::new(stream));
                }
                Err(error) => {
                    refused(access, peer.address, &error);
                    *self = Self::Failed;
                    return Poll::Ready(Err(error));
                }
            }
        }
        Poll::Ready(match self {
            Self::Plain(stream) => Ok(Pin::new(stream)),
            Self::Tls(stream) => Ok(Pin::new(stream.as_mut())),
            Self::Handshake(..) | Self::Failed => Err(io::ErrorKind::NotConnected.into()),
        })
    }

    /// Ends the TLS handshake of a client that is too slow, and logs this.
    pub(super) fn too_slow(&mut self) {
        if let Self::Handshake(_, peer, access) = self {
            refused(
                access,
                peer.address,
                &io::Error::new(io::ErrorKind::TimedOut, "it took too long"),
            );
            *self = Self::Failed;
        }
    }

    /// Shuts down the writing direction.
    pub(super) fn poll_shutdown(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(context),
            // Nothing was written.
            Self::Handshake(..) | Self::Failed => Poll::Ready(Ok(())),
        }
    }
}

/// Returns the DNS names and URIs that the peer's certificate is for; none without a certificate.
fn names(stream: &TlsStream<TcpStream>) -> Vec<String> {
    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let Some(Ok(certificate)) = certificates.first().map(webpki::EndEntityCert::try_from) else {
        return Vec::new();
    };
    let names = certificate.valid_dns_names().chain(certificate.valid_uri_names());
    names.map(str::to_owned).collect()
}

/// Logs a failed handshake; at debug level if the client disconnected, as load balancers do when they check the port.
fn refused(access: &Access, address: Option<SocketAddr>, error: &io::Error) {
    let peer = address.map(tracing::field::display);
    if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) {
        tracing::debug!(peer, %error, "a connection ended before TLS was agreed on");
        return;
    }
    if access.handshake_failed(address) {
        tracing::warn!(peer, error = chain(error), "a client could not agree on TLS");
    }
}

/// Returns an error with those of its causes that add information.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let inner = error.to_string();
        if !text.contains(&inner) {
            text.push_str(": ");
            text.push_str(&inner);
        }
        cause = error.source();
    }
    text
}
