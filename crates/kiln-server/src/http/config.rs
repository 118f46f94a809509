//! The configuration of a server.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kiln_credentials::Trust;
use kiln_engine::Embedded;
use kiln_filters::ImageCheck;

use crate::http::proxies::Network;
use crate::http::tls::Tls;
use crate::http::webhooks::WebhookConfig;
use crate::jobs::JobsConfig;
use crate::jobs::keys::ApiKey;
use crate::jobs::limits::Limits;
use crate::jobs::store::GalleryLimits;
use crate::jobs::traces::TraceConfig;

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder of the job database and the image files.
    pub folder: PathBuf,
    /// The API keys, one of which clients must send; none for no authentication.
    pub api_keys: Vec<ApiKey>,
    /// How long the answer to the first wrong key of an address takes; each further one takes twice as long.
    pub wrong_key_delay: Duration,
    /// The certificate for HTTPS; `None` for plain HTTP.
    pub tls: Option<Arc<Tls>>,
    /// Proxies whose `X-Forwarded-*` headers count.
    pub trusted_proxies: Vec<Network>,
    /// Host names accepted in the `Host` header, besides the local ones; `*` accepts any.
    pub hosts: Vec<String>,
    /// Limits on requests.
    pub limits: Limits,
    /// Other names for models, with the model each stands for.
    pub model_aliases: Vec<(String, String)>,
    /// Webhooks, if jobs may name one.
    pub webhooks: Option<WebhookConfig>,
    /// What the gallery keeps; the oldest images beyond it are deleted.
    pub gallery: GalleryLimits,
    /// How long running jobs may continue at shutdown before they are returned to the queue.
    pub grace: Duration,
    /// Maximum duration of a job.
    pub job_timeout: Duration,
    /// How long a client may send nothing of a request's body, or read nothing of a response.
    pub io_timeout: Duration,
    /// What image files say of how they were generated.
    pub embedded: Embedded,
    /// Whose signatures of images are trusted, besides those of C2PA's list.
    pub trust: Trust,
    /// Whether `/v1/verify` needs no API key.
    pub public_verify: bool,
    /// The check that every image must pass before it is stored or shown; previews are off with it.
    pub check: Option<ImageCheck>,
    /// Where the traces of jobs go, if anywhere.
    pub traces: Option<TraceConfig>,
}

impl Config {
    /// The default configuration with its data in `folder`: local host names only, no API key.
    pub fn new(folder: impl Into<PathBuf>) -> Config {
        let folder = folder.into();
        Config {
            // Errors that clients see name no folder, which only a whole path shows.
            folder: std::path::absolute(&folder).unwrap_or(folder),
            api_keys: Vec::new(),
            wrong_key_delay: Duration::from_millis(250),
            tls: None,
            trusted_proxies: Vec::new(),
            hosts: Vec::new(),
            limits: Limits::default(),
            model_aliases: Vec::new(),
            webhooks: None,
            gallery: GalleryLimits { images: 10_000, bytes: None },
            grace: Duration::from_secs(20),
            job_timeout: Duration::from_secs(3600),
            io_timeout: Duration::from_secs(30),
            embedded: Embedded::default(),
            trust: Trust::default(),
            public_verify: false,
            check: None,
            traces: None,
        }
    }

    /// The part of it that is about jobs.
    pub(crate) fn of_jobs(&self) -> JobsConfig {
        JobsConfig {
            limits: self.limits.clone(),
            model_aliases: self.model_aliases.clone(),
            gallery: self.gallery,
            grace: self.grace,
            job_timeout: self.job_timeout,
            embedded: self.embedded.clone(),
            check: self.check.clone(),
            traces: self.traces.clone(),
        }
    }
}
