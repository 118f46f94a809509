//! The HTTP side: routes, access, connections, the page, and the server that is made of them and of the jobs.

pub(crate) mod api;
pub(crate) mod auth;
mod body_budget;
pub(crate) mod config;
mod connections;
pub(crate) mod listen;
mod page;
pub(crate) mod proxies;
pub(crate) mod server;
mod stream;
pub(crate) mod tls;
pub(crate) mod webhooks;
mod wrong_keys;
