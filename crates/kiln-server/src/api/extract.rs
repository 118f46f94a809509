//! Parts of a request: path and query parameters, and the client it counts for. Errors are JSON, as everywhere.

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequestParts, Path as AxumPath, Query as AxumQuery};
use axum::http::header;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use super::Peer;
use super::error::ApiError;

/// Maximum length of a client's name.
const MAX_NAME: usize = 64;

/// Parameters in the path.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = AxumPath::from_request_parts(parts, state).await;
        let AxumPath(value) = path.map_err(|error: PathRejection| {
            ApiError::invalid(format!("invalid path: {}", error.body_text()))
        })?;
        Ok(Path(value))
    }
}

/// Parameters in the query.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = AxumQuery::from_request_parts(parts, state).await;
        let AxumQuery(value) = query.map_err(|error: QueryRejection| {
            ApiError::invalid(format!("invalid query: {}", error.body_text()))
        })?;
        Ok(Query(value))
    }
}

/// The client that a request counts for in the fair queue: the header `X-Client-Id`, or else the IP address.
pub(crate) struct Client(pub(crate) String);

impl Client {
    /// The client of a request.
    pub(crate) fn of(parts: &Parts) -> Client {
        let named = parts.headers.get("x-client-id").and_then(|value| value.to_str().ok());
        let named = named.filter(|name| !name.is_empty()).map(pseudonym);
        let address = || parts.extensions.get::<Peer>().map(|peer| peer.0.ip().to_string());
        Client(named.or_else(address).unwrap_or_default())
    }
}

impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(Client::of(parts))
    }
}

/// The address under which the client knows this server, such as `http://localhost:7860`; empty without a `Host` header.
pub(crate) struct BaseUrl(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for BaseUrl {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        // The router has checked that the host is one of ours.
        let host = parts.headers.get(header::HOST).and_then(|value| value.to_str().ok());
        Ok(BaseUrl(host.map(|host| format!("http://{host}")).unwrap_or_default()))
    }
}

/// The name under which a client is logged and stored: its own if that is a plain identifier, else a hash of it. Clients
/// send e-mail addresses.
pub(crate) fn pseudonym(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    if name.len() <= MAX_NAME && name.chars().all(is_plain) {
        return name.to_owned();
    }
    format!("client-{}", kiln_base::hex(&Sha256::digest(name)[..8]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn personal_names_become_pseudonyms() {
        for plain in ["user-123abc", "10.0.0.1", "::1", "a_b"] {
            assert_eq!(pseudonym(plain), plain);
        }
        let hashed = pseudonym("ada@example.org");
        assert!(hashed.starts_with("client-") && !hashed.contains("ada"), "{hashed}");
        assert_eq!(hashed, pseudonym("ada@example.org"));
        assert_ne!(hashed, pseudonym("bob@example.org"));
        assert!(pseudonym(&"x".repeat(65)).len() < 65 && pseudonym("Ada Lovelace").starts_with("client-"));
    }
}
