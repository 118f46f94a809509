//! The address of the hub and the cache folder, from the environment variables of Hugging Face's programs.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::{Error, Result};

const ENDPOINT: &str = "https://huggingface.co";

/// How to reach the hub.
#[derive(Clone)]
pub struct HubSettings {
    /// The address of the hub, without a trailing slash.
    pub endpoint: String,
    /// The cache folder.
    pub cache: PathBuf,
    /// The access token for gated repositories. Sent only to the endpoint, never to other hosts it redirects to.
    pub token: Option<String>,
    /// Number of attempts without any progress before a download fails.
    pub attempts: u32,
    /// The wait before the second attempt; doubled before each further one.
    pub backoff: Duration,
    /// How long a connection may deliver nothing, or next to nothing, before the attempt fails. A download that stalls
    /// for good fails after `attempts` times this.
    pub timeout: Duration,
}

impl Default for HubSettings {
    fn default() -> Self {
        HubSettings {
            endpoint: ENDPOINT.into(),
            cache: PathBuf::new(),
            token: None,
            attempts: 5,
            backoff: Duration::from_millis(500),
            timeout: Duration::from_secs(30),
        }
    }
}

/// Without the token, because settings end up in logs.
impl fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "…");
        let HubSettings { endpoint, cache, attempts, backoff, .. } = self;
        write!(
            f,
            "HubSettings {{ {endpoint}, {cache:?}, token {token:?}, {attempts} attempts, {backoff:?} }}"
        )
    }
}

impl HubSettings {
    /// Reads the environment; `None` if no cache folder can be determined.
    pub fn from_env() -> Option<HubSettings> {
        HubSettings::resolve(&|name| std::env::var(name).ok(), kiln_base::folders::home())
    }

    /// Refuses variables that downloads depend on and that can't be used, which would otherwise be ignored or fail
    /// without being named.
    pub fn check_env() -> Result<()> {
        check_variables(&|name| std::env::var(name).ok())
    }

    fn resolve(var: &dyn Fn(&str) -> Option<String>, user: Option<PathBuf>) -> Option<HubSettings> {
        let var = |name: &str| var(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        // As Hugging Face's programs take them: `~` is the user's folder.
        let path = |name: &str| var(name).map(|text| kiln_base::folders::expand(&text, user.as_deref()));
        let home = path("HF_HOME").or_else(|| {
            let cache = path("XDG_CACHE_HOME").or_else(|| Some(user.as_ref()?.join(".cache")));
            Some(cache?.join("huggingface"))
        });
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub")))?;
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        let token = var("HF_TOKEN").or_else(|| var("HUGGING_FACE_HUB_TOKEN")).or_else(|| {
            let text = fs::read(token_file?).and_then(kiln_base::decode_text).ok()?;
            Some(text.trim().to_owned()).filter(|t| !t.is_empty())
        });
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        Some(HubSettings {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache,
            // Characters that could end the HTTP header are not allowed.
            token: token.filter(|t| t.bytes().all(|b| b.is_ascii_graphic())),
            ..HubSettings::default()
        })
    }
}

fn check_variables(var: &dyn Fn(&str) -> Option<String>) -> Result<()> {
    // In the order in which the client looks for a proxy.
    const PROXIES: [&str; 6] =
        ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];
    for name in PROXIES {
        let Some(value) = var(name).filter(|value| !value.is_empty()) else { continue };
        if value.contains(char::is_whitespace) || ureq::Proxy::new(&value).is_err() {
            let reason = "expected a proxy such as http://user:password@host:8080".to_owned();
            return Err(Error::Variable { name, reason });
        }
    }
    let endpoint = var("HF_ENDPOINT").map(|value| value.trim().to_owned()).unwrap_or_default();
    let has_host = ["http://", "https://"].iter().any(|scheme| {
        let host = endpoint.strip_prefix(scheme).and_then(|rest| rest.split('/').next());
        host.is_some_and(|host| !host.is_empty() && !host.contains(char::is_whitespace))
    });
    if !endpoint.is_empty() && !has_host {
        let reason = "expected an address such as https://huggingface.co".to_owned();
        return Err(Error::Variable { name: "HF_ENDPOINT", reason });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_cannot_be_used_are_named() {
        let check = |name: &str, value: &str| {
            let var = |asked: &str| (asked == name).then(|| value.to_owned());
            check_variables(&var).map_err(|error| error.to_string())
        };
        for (name, value) in [
            ("HTTPS_PROXY", "http://user:secret word@host"),
            ("all_proxy", "nonsense://x"),
            ("HF_ENDPOINT", "huggingface.co"),
            ("HF_ENDPOINT", "https:///x"),
        ] {
            let message = check(name, value).unwrap_err();
            assert!(message.contains(name) && !message.contains("secret"), "{message}");
        }
        for (name, value) in [
            ("HTTPS_PROXY", "http://user:password@host:8080"),
            ("http_proxy", "host:3128"),
            ("HTTP_PROXY", ""),
            ("HF_ENDPOINT", "http://127.0.0.1:80/hub"),
        ] {
            check(name, value).unwrap();
        }
    }

    fn settings(vars: &[(&str, &str)]) -> Option<HubSettings> {
        let var = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        HubSettings::resolve(&var, var("HOME").map(PathBuf::from))
    }

    #[test]
    fn the_cache_is_that_of_other_hugging_face_programs() {
        let cache = |vars: &[(&str, &str)]| settings(vars).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/h")]), PathBuf::from("/h/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/hf")]), PathBuf::from("/hf/hub"));
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]), PathBuf::from("/c"));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/hf")]), PathBuf::from("/h/hf/hub"));
        assert!(settings(&[]).is_none());
    }

    #[test]
    fn the_token_comes_from_a_variable_or_the_login_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("token"), "from-file\n").unwrap();
        let home = dir.path().to_str().unwrap();
        let token = |vars: &[(&str, &str)]| settings(vars).unwrap().token;
        assert_eq!(token(&[("HF_HOME", home)]).as_deref(), Some("from-file"));
        // As PowerShell's `>` writes it.
        let utf16 = "\u{feff}from-file\r\n".encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
        fs::write(dir.path().join("token"), utf16).unwrap();
        assert_eq!(token(&[("HF_HOME", home)]).as_deref(), Some("from-file"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_TOKEN", " own ")]).as_deref(), Some("own"));
        assert_eq!(token(&[("HF_HOME", "/none"), ("HF_TOKEN", "a\r\nb: c")]), None);
        let shown = format!("{:?}", settings(&[("HF_HOME", home), ("HF_TOKEN", "secret")]).unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }
}
