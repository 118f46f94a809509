//! Who sends a request: what it counts for, what it may see, and whether it gets in at all.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{Method, Version, header};

use super::error::ApiError;
use crate::http::auth::{Auth, Identity, is_same_origin};
use crate::http::config::Config;
use crate::http::connections::network;
use crate::http::proxies::Origin;
use crate::jobs::Jobs;
use crate::jobs::caller::Caller;
use crate::jobs::error::ErrorCode;
use crate::jobs::keys::Quotas;
use crate::jobs::traces::TraceContext;

/// When to try again after too many wrong keys, in seconds.
const WRONG_KEYS_RETRY_SECONDS: u64 = 10;

/// The route that the operator can open to all.
const VERIFY: &str = "/v1/verify";

impl Caller {
    /// Somebody without a key, on a server that has keys.
    fn stranger(origin: &Origin, host: Option<&str>) -> Caller {
        let scheme = if origin.secure { "https" } else { "http" };
        Caller {
            client: network(origin.address).to_string(),
            admin: false,
            quotas: Quotas::default(),
            key: None,
            secure: origin.secure,
            base_url: host.map(|host| format!("{scheme}://{host}")).unwrap_or_default(),
            trace: None,
        }
    }

    fn new(identity: Identity, origin: &Origin, host: Option<&str>) -> Option<Caller> {
        let secure = origin.secure;
        let scheme = if secure { "https" } else { "http" };
        let base_url = host.map(|host| format!("{scheme}://{host}")).unwrap_or_default();
        match identity {
            Identity::Open => Some(Caller {
                client: network(origin.address).to_string(),
                admin: true,
                quotas: Quotas::default(),
                key: None,
                secure,
                base_url,
                trace: None,
            }),
            Identity::Key(key) => Some(Caller {
                client: format!("key:{}", key.name),
                admin: key.admin,
                quotas: key.quotas,
                key: Some(key),
                secure,
                base_url,
                trace: None,
            }),
            Identity::Missing | Identity::Wrong => None,
        }
    }

    /// Refuses keys that are not marked `admin`.
    pub(crate) fn require_admin(&self) -> Result<(), ApiError> {
        if self.admin {
            return Ok(());
        }
        Err(ApiError::new(ErrorCode::AdminOnly, "this needs a key that is marked `admin`"))
    }

    /// The caller of a request, as the middleware found it.
    pub(crate) fn of(parts: &Parts) -> Result<&Caller, ApiError> {
        parts.extensions.get::<Caller>().ok_or_else(unauthorized)
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, ApiError> {
        Caller::of(parts).cloned()
    }
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) encrypted: bool,
}

/// What decides who gets in.
#[derive(Clone)]
pub(crate) struct Gate {
    pub(crate) config: Arc<Config>,
    pub(crate) auth: Arc<Auth>,
    pub(crate) jobs: Jobs,
}

/// Why a request is refused before it is handled.
pub(crate) enum Refusal {
    /// At once.
    Error(ApiError),
    /// A wrong key from this address: after a delay.
    WrongKey(IpAddr),
}

/// Finds out who sends a request; `None` for routes that are open to all.
pub(crate) fn identify(gate: &Gate, request: &Request) -> Result<Option<Caller>, Refusal> {
    let headers = request.headers();
    let peer = request.extensions().get::<Peer>().copied();
    let peer = peer.unwrap_or(Peer { address: (Ipv4Addr::LOCALHOST, 0).into(), encrypted: false });
    let origin = Origin::new(peer.address.ip(), peer.encrypted, headers, &gate.config.trusted_proxies);
    let named = host(request).map_err(Refusal::Error)?;
    let host = origin.host.as_deref().or(named);
    let page = headers.get(header::ORIGIN).map(|value| value.to_str().unwrap_or("?"));
    if !is_same_origin(host, page, &gate.config.hosts) {
        let message = "cross-site request, or a host name this server doesn't accept";
        return Err(Refusal::Error(ApiError::new(ErrorCode::Foreign, message)));
    }
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    if reads && is_public(request.uri().path()) {
        return Ok(None);
    }
    let address = network(origin.address);
    if Auth::carries_key(headers) && !gate.auth.wrong_keys.may_try(address) {
        let message = "too many wrong API keys from this address; try again later";
        let error = ApiError::new(ErrorCode::TooManyAttempts, message);
        return Err(Refusal::Error(error.retry_after(WRONG_KEYS_RETRY_SECONDS)));
    }
    let identity = gate.auth.identify(headers, origin.secure);
    if matches!(identity, Identity::Wrong) {
        return Err(Refusal::WrongKey(address));
    }
    let is_verify = *request.method() == Method::POST && request.uri().path() == VERIFY;
    if matches!(identity, Identity::Missing) && is_verify && gate.config.public_verify {
        return Ok(Some(Caller::stranger(&origin, host)));
    }
    let trace = headers.get("traceparent").and_then(|header| TraceContext::parse(header.to_str().ok()?));
    let caller = Caller::new(identity, &origin, host).map(|caller| Caller { trace, ..caller });
    caller.map(Some).ok_or_else(|| Refusal::Error(unauthorized()))
}

/// The host that the client asks for: in the header, in the URI as HTTP/2 and clients of proxies have it, or the same in
/// both. A proxy may have looked at another one than this server.
fn host(request: &Request) -> Result<Option<&str>, ApiError> {
    let refused = |message: &str| ApiError::new(ErrorCode::InvalidHost, message);
    let in_uri = request.uri().authority().map(|authority| authority.as_str());
    let mut headers = request.headers().get_all(header::HOST).iter();
    let in_header = headers.next().map(|value| value.to_str().unwrap_or("?"));
    if headers.next().is_some() {
        return Err(refused("the request has several Host headers"));
    }
    match (in_header, in_uri) {
        (Some(header), Some(uri)) if !header.eq_ignore_ascii_case(uri) => {
            Err(refused("the Host header names another host than the request's address"))
        }
        (None, None) if is_health(request.uri().path()) && request.version() < Version::HTTP_11 => {
            // Load balancers ask this way.
            Ok(Some("localhost"))
        }
        (None, None) => Err(refused("the request names no host")),
        (header, uri) => Ok(header.or(uri)),
    }
}

fn is_health(path: &str) -> bool {
    matches!(path, "/healthz" | "/readyz")
}

/// Routes that need no API key: they reveal nothing private.
pub(crate) fn is_public(path: &str) -> bool {
    is_health(path) || matches!(path, "/" | "/openapi.json" | "/favicon.ico") || path.starts_with("/page/")
}

pub(crate) fn unauthorized() -> ApiError {
    let message = "missing or wrong API key: send it as `Authorization: Bearer KEY`";
    ApiError::new(ErrorCode::InvalidApiKey, message)
}
