//! Who asks: what it counts for, and what it may see.

use std::sync::Arc;

use crate::jobs::keys::{KeyInfo, Quotas};
use crate::jobs::traces::TraceContext;

/// Who sends a request.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// What turns, quotas and ownership count for: `key:NAME`, or the address where there are no keys. Nothing that a
    /// client can make up.
    pub(crate) client: String,
    /// Whether it may see and change everything: an admin key, or a server without keys.
    pub(crate) admin: bool,
    pub(crate) quotas: Quotas,
    pub(crate) key: Option<Arc<KeyInfo>>,
    /// Whether the client's connection is encrypted.
    pub(crate) secure: bool,
    /// The address under which the client knows this server, such as `http://localhost:7860`; empty without a host.
    pub(crate) base_url: String,
    /// The trace that the request belongs to, as its header `traceparent` says.
    pub(crate) trace: Option<TraceContext>,
}

impl Caller {
    /// Whether it may see and change what this client made.
    pub(crate) fn sees(&self, client: &str) -> bool {
        self.admin || self.client == client
    }

    /// Whether this client is the caller itself; without keys everybody is.
    pub(crate) fn owns(&self, client: &str) -> bool {
        self.key.is_none() || self.client == client
    }

    /// The client whose jobs and images it sees; `None` for all.
    pub(crate) fn only(&self) -> Option<&str> {
        (!self.admin).then_some(self.client.as_str())
    }

    /// Whether it may train, where trainings are allowed.
    pub(crate) fn may_train(&self) -> bool {
        self.admin || self.quotas.train
    }
}
