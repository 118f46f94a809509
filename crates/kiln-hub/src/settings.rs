//! Where the hub and the cache are, as the other programs that use them have it.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const ENDPOINT: &str = "https://huggingface.co";

/// How the hub is reached.
#[derive(Clone)]
pub struct Settings {
    /// The address of the hub, without a slash at the end.
    pub endpoint: String,
    /// The folder of the cache.
    pub cache: PathBuf,
    /// Opens gated repositories. Sent to the endpoint only, never to where it redirects.
    pub token: Option<String>,
    /// How often a connection may break without anything having come before it is given up.
    pub attempts: u32,
    /// How long to wait before the second attempt; twice as long before each further one.
    pub pause: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            endpoint: ENDPOINT.into(),
            cache: PathBuf::new(),
            token: None,
            attempts: 5,
            pause: Duration::from_millis(500),
        }
    }
}

/// Without the token: settings end up in logs.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "…");
        let Settings { endpoint, cache, attempts, pause, .. } = self;
        write!(f, "Settings {{ {endpoint}, {cache:?}, token {token:?}, {attempts} attempts, {pause:?} }}")
    }
}

impl Settings {
    /// From the variables of the environment; `None` when there is no place for a cache.
    pub fn from_env() -> Option<Settings> {
        Settings::read(&|name| std::env::var(name).ok())
    }

    fn read(var: &dyn Fn(&str) -> Option<String>) -> Option<Settings> {
        let var = |name: &str| var(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let path = |name: &str| var(name).map(PathBuf::from);
        let user = path("HOME").or_else(|| path("USERPROFILE"));
        let home = path("HF_HOME").or_else(|| {
            let cache = path("XDG_CACHE_HOME").or_else(|| Some(user?.join(".cache")));
            Some(cache?.join("huggingface"))
        });
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub")))?;
        let saved = path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        let token = var("HF_TOKEN").or_else(|| var("HUGGING_FACE_HUB_TOKEN")).or_else(|| {
            let text = fs::read_to_string(saved?).ok()?;
            Some(text.trim().to_owned()).filter(|t| !t.is_empty())
        });
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        Some(Settings {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache,
            // Nothing that could end the header it goes into.
            token: token.filter(|t| t.bytes().all(|b| b.is_ascii_graphic())),
            ..Settings::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(vars: &[(&str, &str)]) -> Option<Settings> {
        let var = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Settings::read(&var)
    }

    #[test]
    fn the_cache_is_where_the_other_programs_have_it() {
        let cache = |vars: &[(&str, &str)]| settings(vars).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/h")]), PathBuf::from("/h/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/hf")]), PathBuf::from("/hf/hub"));
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]), PathBuf::from("/c"));
        assert!(settings(&[]).is_none());
    }

    #[test]
    fn the_token_comes_from_a_variable_or_the_file_that_a_login_leaves() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("token"), "from-file\n").unwrap();
        let home = dir.path().to_str().unwrap();
        let token = |vars: &[(&str, &str)]| settings(vars).unwrap().token;
        assert_eq!(token(&[("HF_HOME", home)]).as_deref(), Some("from-file"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_TOKEN", " own ")]).as_deref(), Some("own"));
        assert_eq!(token(&[("HF_HOME", "/none"), ("HF_TOKEN", "a\r\nb: c")]), None);
        let shown = format!("{:?}", settings(&[("HF_HOME", home), ("HF_TOKEN", "secret")]).unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }
}
