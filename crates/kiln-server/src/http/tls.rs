//! TLS by the server itself: a certificate and a key from PEM files, read again when they change.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use kiln_base::lock;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the files are looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The protocol that browsers call HTTP/2.
const HTTP2: &[u8] = b"h2";

/// Why a certificate can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file can't be read, or holds no certificate or key.
    #[error("can't read the {what} in `{path}`: {reason}")]
    File {
        /// `certificate` or `private key`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The certificate and the key don't fit.
    #[error("the certificate `{certificate}` and the private key `{key}` can't be used together: {reason}")]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// The certificate of the server.
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    current: Mutex<Current>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

struct Current {
    acceptor: TlsAcceptor,
    versions: [Option<SystemTime>; 2],
    checked: Instant,
}

impl Tls {
    /// Reads a certificate chain and its private key from PEM files.
    pub fn new(certificate: &Path, key: &Path) -> Result<Tls, TlsError> {
        let current = Current {
            versions: versions(certificate, key),
            acceptor: acceptor(certificate, key)?,
            checked: Instant::now(),
        };
        Ok(Tls { certificate: certificate.into(), key: key.into(), current: Mutex::new(current) })
    }

    /// The acceptor for a new connection: of today's certificate, or if that can't be read of the last one.
    fn acceptor(&self) -> TlsAcceptor {
        let mut current = lock(&self.current);
        if current.checked.elapsed() >= CHECK_INTERVAL {
            current.checked = Instant::now();
            self.reload(&mut current);
        }
        current.acceptor.clone()
    }

    fn reload(&self, current: &mut Current) {
        let versions = versions(&self.certificate, &self.key);
        if versions == current.versions {
            return;
        }
        match acceptor(&self.certificate, &self.key) {
            Ok(acceptor) => {
                tracing::info!("read the new certificate");
                (current.acceptor, current.versions) = (acceptor, versions);
            }
            Err(error) => tracing::warn!(%error, "keeping the old certificate"),
        }
    }

    /// Shakes hands with a client. Also returns whether it speaks HTTP/2.
    pub(crate) async fn accept<T: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: T,
    ) -> std::io::Result<(TlsStream<T>, bool)> {
        let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.acceptor().accept(stream)).await??;
        let http2 = stream.get_ref().1.alpn_protocol() == Some(HTTP2);
        Ok((stream, http2))
    }
}

/// When the files were last changed.
fn versions(certificate: &Path, key: &Path) -> [Option<SystemTime>; 2] {
    [certificate, key].map(|path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok())
}

fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let unreadable = |what, path: &Path, reason: String| TlsError::File { what, path: path.into(), reason };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>())
        .map_err(|error| unreadable("certificate", certificate, error.to_string()))?;
    if chain.is_empty() {
        let reason = "it holds no certificate in PEM format".into();
        return Err(unreadable("certificate", certificate, reason));
    }
    let private = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| unreadable("private key", key, error.to_string()))?;
    let mismatch = |error: tokio_rustls::rustls::Error| TlsError::Mismatch {
        certificate: certificate.into(),
        key: key.into(),
        reason: error.to_string(),
    };
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(chain, private))
        .map_err(mismatch)?;
    config.alpn_protocols = vec![HTTP2.to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
