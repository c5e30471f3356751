//! Connections to one or more brokers.

use std::{
    fmt,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use prost::Message;
use tonic::{
    Request, Status,
    body::Body,
    codegen::{
        Service, StdError,
        http::{self, HeaderValue, Uri, header, uri::Scheme},
    },
};

use crate::{
    error::{Error, Result, is_transient},
    item::to_proto_duration,
    pool::{Address, Location, Pool},
    proto::{
        Item, PopRequest, admin_service_client::AdminServiceClient,
        operation_service_client::OperationServiceClient, queue_service_client::QueueServiceClient,
        schedule_service_client::ScheduleServiceClient,
        template_service_client::TemplateServiceClient,
    },
    transport::{Endpoint, Tls, is_broken},
};

pub use crate::transport::Received;

/// Default limit of one received message, above a broker's largest page of items.
const DEFAULT_MAX_MESSAGE: usize = 32 << 20;
const USER_AGENT: &str = concat!("sluicegate-client/", env!("CARGO_PKG_VERSION"));

/// What carries the calls of a client: to the address in use, with the client's credentials. A call that cannot reach that address
/// fails, and the next one goes to another address.
#[derive(Clone)]
pub struct Transport {
    location: Arc<Location>,
    authorization: Option<HeaderValue>,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("location", &self.location).finish_non_exhaustive()
    }
}

impl Service<http::Request<Body>> for Transport {
    type Response = http::Response<Received>;
    type Error = Status;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    /// Always ready: the call itself waits for the connection.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let headers = request.headers_mut();
        headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
        if let Some(value) = &self.authorization {
            headers.insert(header::AUTHORIZATION, value.clone());
        }
        let location = Arc::clone(&self.location);
        async move {
            let address = location.address();
            let called = address.channel.call(request).await;
            if let Err(status) = &called
                && is_broken(status)
            {
                location.fail_over(&address);
            }
            called
        }
        .boxed()
    }
}

/// How to reach the brokers; [`Client::builder`] returns one. Its debug form shows neither the token nor the private key.
#[derive(Clone)]
#[must_use = "a builder does nothing until it connects"]
pub struct ClientBuilder {
    urls: Vec<String>,
    token: Option<String>,
    ca: Option<String>,
    identity: Option<(String, String)>,
    tls_domain: Option<String>,
    connect_timeout: Duration,
    request_timeout: Duration,
    keep_alive: Duration,
    max_receive: usize,
    max_send: usize,
}

impl fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientBuilder")
            .field("urls", &self.urls)
            .field("token", &self.token.as_ref().map(|_| "***"))
            .field("ca", &self.ca)
            .field("identity", &self.identity.as_ref().map(|(certificate, _)| (certificate, "***")))
            .field("tls_domain", &self.tls_domain)
            .field("connect_timeout", &self.connect_timeout)
            .field("request_timeout", &self.request_timeout)
            .field("keep_alive", &self.keep_alive)
            .field("max_receive", &self.max_receive)
            .field("max_send", &self.max_send)
            .finish()
    }
}

impl ClientBuilder {
    /// Adds another broker on the same database. A host name stands for all its addresses.
    ///
    /// Each producer and each consumer takes the next address. It goes to another one when that fails, and about every
    /// 20 minutes, so that load spreads to brokers that were added. All other calls of a client stay at one address until it
    /// fails. An address that failed is used again once it can be reached.
    pub fn endpoint(mut self, url: impl Into<String>) -> Self {
        self.urls.push(url.into());
        self
    }

    /// Sends `authorization: Bearer TOKEN` with each call.
    pub fn bearer_token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// For `https`: trusts only the certificate authorities in this PEM text. Default: those that Mozilla trusts.
    pub fn ca_certificate(mut self, pem: impl Into<String>) -> Self {
        self.ca = Some(pem.into());
        self
    }

    /// For `https`: presents this certificate, with its private key, to the broker. Both are PEM text.
    pub fn client_certificate(mut self, pem: impl Into<String>, key: impl Into<String>) -> Self {
        self.identity = Some((pem.into(), key.into()));
        self
    }

    /// For `https`: sets the name that the broker's certificate must have. Default: the host of the URL.
    pub fn tls_domain(mut self, domain: impl Into<String>) -> Self {
        self.tls_domain = Some(domain.into());
        self
    }

    /// Sets how long connecting may take. Default 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets how long one unary call may take, not counting the time for which it waits for items. Default 30 s.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Sets how often an open connection is pinged (HTTP/2). A ping unanswered for as long again closes the connection.
    /// Default 15 s.
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.keep_alive = interval;
        self
    }

    /// Sets the size of the largest message to receive, in bytes. Default 32 MiB.
    pub fn max_receive_bytes(mut self, bytes: usize) -> Self {
        self.max_receive = bytes;
        self
    }

    /// Sets the size of the largest message to send, in bytes. Default: only the broker limits it.
    pub fn max_send_bytes(mut self, bytes: usize) -> Self {
        self.max_send = bytes;
        self
    }

    /// Connects to the first broker that can be reached.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if none can; [`Error::InvalidAddress`], [`Error::InvalidToken`].
    pub async fn connect(self) -> Result<Client> {
        let addresses = self.urls.join(", ");
        let client = self.build()?;
        let pool = Arc::clone(&client.inner.pool);
        pool.look_up().await;
        match pool.connect().await {
            Ok(address) => Ok(Client { location: Location::new(&pool, address), ..client }),
            Err(source) => Err(Error::Unreachable { addresses, source }),
        }
    }

    /// Connects when the first call is made. Calls fail with `UNAVAILABLE` while no broker can be reached.
    ///
    /// # Errors
    /// [`Error::InvalidAddress`], [`Error::InvalidToken`].
    pub fn connect_lazy(self) -> Result<Client> {
        self.build()
    }

    fn build(self) -> Result<Client> {
        let authorization = match &self.token {
            Some(token) => Some(bearer(token)?),
            None => None,
        };
        let (request_timeout, max_receive) = (self.request_timeout, self.max_receive);
        let max_send = self.max_send;
        let urls = self.urls.clone();
        let pool = Pool::new(urls, Box::new(move |url, at| self.endpoint_of(url, at)))?;
        Ok(Client {
            location: Location::new(&pool, pool.next()),
            inner: Arc::new(Inner { pool, authorization, request_timeout, max_receive, max_send }),
        })
    }

    /// Returns the endpoint of a URL, at one address of its host or at any.
    fn endpoint_of(&self, url: &str, at: Option<SocketAddr>) -> Result<Endpoint> {
        let invalid = |source: StdError| Error::InvalidAddress { url: url.to_owned(), source };
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(invalid("it must start with http:// or https://".into()));
        }
        let uri: Uri = url.parse().map_err(|error| invalid(Box::new(error)))?;
        let tls = if uri.scheme() == Some(&Scheme::HTTPS) {
            let name = self.tls_domain.as_deref().or_else(|| uri.host()).unwrap_or_default();
            // Of an IPv6 address without its brackets.
            let name = name.trim_start_matches('[').trim_end_matches(']');
            let identity = self.identity.as_ref().map(|(pem, key)| (pem.as_str(), key.as_str()));
            Some(Tls::new(name, self.ca.as_deref(), identity).map_err(invalid)?)
        } else {
            None
        };
        Endpoint::new(uri, at, tls, self.connect_timeout, self.keep_alive).map_err(invalid)
    }
}

fn bearer(token: &str) -> Result<HeaderValue> {
    let mut value: HeaderValue =
        format!("Bearer {token}").parse().map_err(|_| Error::InvalidToken)?;
    value.set_sensitive(true); // keeps it out of debug output
    Ok(value)
}

/// A handle on the brokers of one database. Clones are cheap and share their connections, which are made when needed and
/// again when they break.
#[derive(Debug, Clone)]
pub struct Client {
    inner: Arc<Inner>,
    location: Arc<Location>,
}

#[derive(Debug)]
struct Inner {
    pool: Arc<Pool>,
    authorization: Option<HeaderValue>,
    request_timeout: Duration,
    max_receive: usize,
    max_send: usize,
}

impl Client {
    /// Connects to the broker at `url`, for example `http://127.0.0.1:7400`, with default settings.
    ///
    /// # Errors
    /// See [`ClientBuilder::connect`].
    pub async fn connect(url: impl Into<String>) -> Result<Self> {
        Self::builder(url).connect().await
    }

    /// Returns settings for connecting to the broker at `url`, and to further ones given by [`ClientBuilder::endpoint`].
    pub fn builder(url: impl Into<String>) -> ClientBuilder {
        ClientBuilder {
            urls: vec![url.into()],
            token: None,
            ca: None,
            identity: None,
            tls_domain: None,
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(30),
            keep_alive: Duration::from_secs(15),
            max_receive: DEFAULT_MAX_MESSAGE,
            max_send: usize::MAX,
        }
    }

    /// Takes up to `max_items` (1 to 1,000) items out of `queue`: at-most-once delivery. Waits up to `wait` (at most 10
    /// minutes) for the first item; with zero, returns immediately.
    ///
    /// # Errors
    /// [`Error::Status`]. An item whose answer was lost is lost. After an error that says that the broker cannot be reached
    /// the next call goes to another one.
    pub async fn pop(
        &self,
        queue: impl Into<String>,
        max_items: u16,
        wait: Duration,
    ) -> Result<Vec<Item>> {
        let message = PopRequest {
            queue: queue.into(),
            max_items: i32::from(max_items),
            wait: Some(to_proto_duration(wait)),
        };
        let request = self.waiting_request(message, wait);
        let address = self.address_in_use();
        let popped = self.queue_service().pop(request).await;
        if let Err(status) = &popped
            && is_transient(status)
        {
            self.fail_over(&address);
        }
        Ok(popped?.into_inner().items)
    }

    /// Refuses a message of a stream that is larger than may be sent: it would end the stream, with all that is under way on it.
    pub(crate) fn may_send(&self, message: &impl Message) -> Result<(), Status> {
        let most = self.inner.max_send;
        if most < usize::MAX && message.encoded_len() > most {
            let bytes = message.encoded_len();
            return Err(Status::out_of_range(format!(
                "a message of {bytes} bytes is larger than max_send_bytes, which is {most}"
            )));
        }
        Ok(())
    }

    /// Returns the generated stub of QueueService.
    pub fn queue_service(&self) -> QueueServiceClient<Transport> {
        QueueServiceClient::new(self.transport())
            .max_decoding_message_size(self.inner.max_receive)
            .max_encoding_message_size(self.inner.max_send)
    }

    /// Returns the generated stub of AdminService.
    pub fn admin_service(&self) -> AdminServiceClient<Transport> {
        AdminServiceClient::new(self.transport())
            .max_decoding_message_size(self.inner.max_receive)
            .max_encoding_message_size(self.inner.max_send)
    }

    /// Returns the generated stub of ScheduleService.
    pub fn schedule_service(&self) -> ScheduleServiceClient<Transport> {
        ScheduleServiceClient::new(self.transport())
            .max_decoding_message_size(self.inner.max_receive)
            .max_encoding_message_size(self.inner.max_send)
    }

    /// Returns the generated stub of OperationService.
    pub fn operation_service(&self) -> OperationServiceClient<Transport> {
        OperationServiceClient::new(self.transport())
            .max_decoding_message_size(self.inner.max_receive)
            .max_encoding_message_size(self.inner.max_send)
    }

    /// Returns the generated stub of TemplateService.
    pub fn template_service(&self) -> TemplateServiceClient<Transport> {
        TemplateServiceClient::new(self.transport())
            .max_decoding_message_size(self.inner.max_receive)
            .max_encoding_message_size(self.inner.max_send)
    }

    /// Returns a request with the client's time-out, for a unary call on one of the stubs.
    pub fn request<T>(&self, message: T) -> Request<T> {
        self.waiting_request(message, Duration::ZERO)
    }

    /// Returns a request whose time-out allows for a long poll of `wait`.
    pub fn waiting_request<T>(&self, message: T, wait: Duration) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.inner.request_timeout.saturating_add(wait));
        request
    }

    /// Returns this client at the next address.
    pub(crate) fn elsewhere(&self) -> Self {
        let location = Location::new(&self.inner.pool, self.inner.pool.next());
        Self { inner: Arc::clone(&self.inner), location }
    }

    /// Returns the address in use, to be given to [`Client::fail_over`] when it fails.
    pub(crate) fn address_in_use(&self) -> Arc<Address> {
        self.location.address()
    }

    /// Goes from a failed address to the next one, unless another call has done so already.
    pub(crate) fn fail_over(&self, failed: &Arc<Address>) {
        self.location.fail_over(failed);
    }

    /// Moves to the next address after long enough at this one.
    pub(crate) fn rotate(&self) {
        self.location.rotate();
    }

    /// Moves to the next address.
    pub(crate) fn go_on(&self) {
        self.location.go_on();
    }

    fn transport(&self) -> Transport {
        Transport {
            location: Arc::clone(&self.location),
            authorization: self.inner.authorization.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_scheme_is_refused() {
        let error = Client::builder("localhost:7400").connect_lazy().unwrap_err();
        assert!(matches!(error, Error::InvalidAddress { .. }), "{error:?}");
    }

    #[test]
    fn a_token_does_not_show_in_debug_output() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _context = runtime.enter();
        let client =
            Client::builder("http://localhost:1").bearer_token("hush").connect_lazy().unwrap();
        assert!(!format!("{client:?}").contains("hush"));
    }

    #[tokio::test]
    async fn an_unreachable_broker_is_named_with_its_address() {
        // Port 1 (tcpmux) is closed on any machine these tests run on.
        let error = Client::connect("http://127.0.0.1:1").await.unwrap_err();
        assert!(error.is_unavailable());
        assert!(error.to_string().contains("127.0.0.1:1"));
    }
}
