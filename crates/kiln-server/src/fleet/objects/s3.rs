//! A bucket of an S3-compatible service, through the crate `object_store` with this server's own HTTP client.

use std::io::Error as IoError;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, ObjectStoreExt, RetryConfig};
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use super::content::{StoredObject, age};
use crate::fleet::config::S3Config;
use crate::fleet::error::{FleetError, Result};

/// How long a request may take.
const TIMEOUT: Duration = Duration::from_secs(9);
/// Largest response, in bytes.
const MAX_ANSWER: u64 = 1 << 30;

/// A bucket, or a folder in one.
pub(super) struct Bucket {
    store: AmazonS3,
    prefix: Path,
}

impl Bucket {
    /// Reads the configuration; sends no request.
    pub(super) fn open(config: &S3Config) -> Result<Bucket> {
        let S3Config { url, settings } = config;
        let invalid = |reason: String| FleetError(format!("`{url}` can't hold files: {reason}"));
        let (bucket, prefix) = url
            .strip_prefix("s3://")
            .map(|rest| rest.split_once('/').unwrap_or((rest, "")))
            .filter(|(bucket, _)| !bucket.is_empty())
            .ok_or_else(|| invalid("expected s3://BUCKET or s3://BUCKET/PREFIX".into()))?;
        let mut builder = AmazonS3Builder::new();
        for (name, value) in settings {
            if let Ok(key) = name.to_ascii_lowercase().parse() {
                builder = builder.with_config(key, value);
            }
        }
        let authority = settings.iter().find(|(name, _)| name == "AWS_CA_BUNDLE").map(|(_, file)| file);
        let agent = agent(authority.map(String::as_str)).map_err(invalid)?;
        let retry = RetryConfig { max_retries: 1, retry_timeout: TIMEOUT, ..RetryConfig::default() };
        let store = builder
            .with_bucket_name(bucket)
            .with_http_connector(Connector(agent))
            .with_retry(retry)
            .build()
            .map_err(|error| invalid(error.to_string()))?;
        Ok(Bucket { store, prefix: Path::from(prefix) })
    }

    /// Checks that the bucket is there and may be listed.
    pub(super) async fn check(&self) -> std::result::Result<(), String> {
        match self.store.list(Some(&self.prefix)).next().await {
            Some(Err(error)) => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    fn path(&self, name: &str) -> Path {
        name.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    pub(super) async fn get(&self, name: &str) -> std::result::Result<Option<Vec<u8>>, String> {
        let found = match self.store.get(&self.path(name)).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        found.bytes().await.map(|bytes| Some(bytes.into())).map_err(|error| error.to_string())
    }

    pub(super) async fn put(&self, name: &str, bytes: Bytes) -> std::result::Result<(), String> {
        let stored = self.store.put(&self.path(name), bytes.into()).await;
        stored.map(|_| ()).map_err(|error| error.to_string())
    }

    pub(super) async fn delete(&self, name: &str) -> std::result::Result<(), String> {
        self.store.delete(&self.path(name)).await.map_err(|error| error.to_string())
    }

    pub(super) async fn list(&self) -> std::result::Result<Vec<StoredObject>, String> {
        let mut found = self.store.list(Some(&self.prefix));
        let mut objects = Vec::new();
        while let Some(object) = found.next().await {
            let object = object.map_err(|error| error.to_string())?;
            let Some(parts) = object.location.prefix_match(&self.prefix) else { continue };
            let name = parts.map(|part| part.as_ref().to_owned()).collect::<Vec<_>>().join("/");
            objects.push(StoredObject { name, age: age(Some(SystemTime::from(object.last_modified))) });
        }
        Ok(objects)
    }
}

/// An HTTP client that trusts the usual authorities, or those of a PEM file.
fn agent(authority: Option<&str>) -> std::result::Result<Agent, String> {
    let mut config = Agent::config_builder()
        .timeout_global(Some(TIMEOUT))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false);
    if let Some(file) = authority {
        let pem = std::fs::read(file).map_err(|error| format!("AWS_CA_BUNDLE: `{file}`: {error}"))?;
        let certificates: Vec<_> = parse_pem(&pem)
            .filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            })
            .collect();
        if certificates.is_empty() {
            return Err(format!("AWS_CA_BUNDLE: `{file}` has no certificate"));
        }
        config = config.tls_config(TlsConfig::builder().root_certs(RootCerts::from(certificates)).build());
    }
    Ok(config.build().into())
}

/// Makes the requests of `object_store` with `ureq`, which is in the program anyway.
#[derive(Clone, Debug)]
struct Connector(Agent);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait::async_trait]
impl HttpService for Connector {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let agent = self.0.clone();
        let answer = tokio::task::spawn_blocking(move || send(&agent, parts, &body)).await;
        answer.unwrap_or_else(|error| Err(HttpError::new(HttpErrorKind::Unknown, error)))
    }
}

fn send(
    agent: &Agent,
    parts: ureq::http::request::Parts,
    body: &[u8],
) -> std::result::Result<HttpResponse, HttpError> {
    let sent = if body.is_empty() && !matches!(parts.method.as_str(), "PUT" | "POST") {
        agent.run(ureq::http::Request::from_parts(parts, ()))
    } else {
        agent.run(ureq::http::Request::from_parts(parts, body))
    };
    let (parts, body) = sent.map_err(http_error)?.into_parts();
    let bytes = body.into_with_config().limit(MAX_ANSWER).read_to_vec().map_err(http_error)?;
    Ok(HttpResponse::from_parts(parts, bytes.into()))
}

fn http_error(error: ureq::Error) -> HttpError {
    let kind = match &error {
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => HttpErrorKind::Connect,
        ureq::Error::Io(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    };
    HttpError::new(kind, IoError::other(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(url: &str, settings: &[(&str, &str)]) -> Result<Bucket> {
        let settings = settings.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Bucket::open(&S3Config { url: url.into(), settings })
    }

    #[test]
    fn an_address_names_a_bucket_and_a_prefix() {
        let bucket = open("s3://images/kiln/a", &[]).unwrap();
        assert_eq!(bucket.path("image/0f.png").as_ref(), "kiln/a/image/0f.png");
        assert_eq!(open("s3://images/", &[]).unwrap().path("input/0f").as_ref(), "input/0f");
        for wrong in ["s3://", "s3:///a", "https://images", "images"] {
            assert!(open(wrong, &[]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn wrong_settings_are_named() {
        let error = |settings: &[(&str, &str)]| open("s3://a", settings).err().unwrap().to_string();
        assert!(error(&[("AWS_CA_BUNDLE", "/missing")]).contains("AWS_CA_BUNDLE"));
        assert!(error(&[("AWS_ACCESS_KEY_ID", "a")]).contains("can't hold files"));
    }
}
