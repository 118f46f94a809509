//! Who may use the server: API keys and the certificate.

use std::path::Path;
use std::sync::Arc;

use kiln_server::{ApiKey, MIN_KEY_LENGTH, Tls};

use crate::args::ServeArgs;
use crate::error::CliError;

/// Reads the API keys and checks that they suffice for the address that the server listens on.
pub fn keys(args: &ServeArgs) -> Result<Vec<ApiKey>, CliError> {
    let keys = match (&args.api_key, &args.api_key_file) {
        (Some(key), _) if key.is_empty() => {
            return Err(CliError::usage("the API key is empty")
                .hint("set KILN_API_KEY to a key, or unset it to serve this machine alone"));
        }
        (Some(key), _) => vec![ApiKey::single(key)],
        (None, Some(file)) => read_keys(file)?,
        (None, None) => Vec::new(),
    };
    check(args, &keys)?;
    Ok(keys)
}

fn read_keys(file: &Path) -> Result<Vec<ApiKey>, CliError> {
    let text = std::fs::read(file).and_then(kiln_base::decode_text).map_err(|error| {
        CliError::new(format!("can't read the file of API keys `{}`: {error}", file.display()))
            .hint("each of its lines holds a name and a key")
    })?;
    warn_if_readable(file);
    ApiKey::parse_file(&text).map_err(|problem| {
        CliError::new(format!("the file of API keys `{}` is invalid: {problem}", file.display()))
            .hint("each line holds a name, a key, and any of admin, train, priority=LEVEL, jobs=N, per-minute=N, inputs=SIZE")
    })
}

#[cfg(unix)]
fn warn_if_readable(file: &Path) {
    use std::os::unix::fs::PermissionsExt;

    let mode = std::fs::metadata(file).map_or(0, |metadata| metadata.permissions().mode());
    if mode & 0o077 != 0 {
        tracing::warn!("other users can read the API keys in `{}`: chmod 600 it", file.display());
    }
}

#[cfg(not(unix))]
fn warn_if_readable(_: &Path) {}

/// Requires long enough API keys if other machines can reach the server, directly or through a proxy.
fn check(args: &ServeArgs, keys: &[ApiKey]) -> Result<(), CliError> {
    let reason = if !args.host.is_loopback() {
        format!("listening on {}", args.host)
    } else if !args.trusted_proxies.is_empty() {
        "a proxy in front".to_owned()
    } else {
        return Ok(());
    };
    if keys.is_empty() {
        return Err(CliError::usage(format!(
            "{reason} opens the server to other machines and requires an API key"
        ))
        .hint("set one with --api-key or the variable KILN_API_KEY, or several with --api-key-file"));
    }
    if let Some(key) = keys.iter().find(|key| key.secret.chars().count() < MIN_KEY_LENGTH) {
        return Err(CliError::usage(format!(
            "the API key `{}` has fewer than {MIN_KEY_LENGTH} characters, and {reason} lets other machines guess it",
            key.name
        ))
        .hint("make one with `openssl rand -hex 16`"));
    }
    Ok(())
}

/// Reads the certificate, if there is one.
pub fn tls(args: &ServeArgs) -> Result<Option<Arc<Tls>>, CliError> {
    match (&args.tls_cert, &args.tls_key) {
        (None, None) => Ok(None),
        (Some(certificate), Some(key)) => {
            let tls = Tls::new(certificate, key).map_err(|error| {
                CliError::new(error.to_string())
                    .hint("both must be PEM files, such as certbot's fullchain.pem and privkey.pem")
            })?;
            Ok(Some(Arc::new(tls)))
        }
        _ => Err(CliError::usage("HTTPS needs both a certificate and its private key")
            .hint("give --tls-cert and --tls-key")),
    }
}
