//! Opens the page in the user's browser.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;

use super::listen::on_this_machine;

/// Opens the page of a server that listens on this address; says so if that fails.
pub fn open(scheme: &str, address: SocketAddr) {
    let url = format!("{scheme}://{}/", on_this_machine(address));
    let browser = std::env::var_os("BROWSER").filter(|browser| !browser.is_empty());
    let opened = browser.map_or_else(|| open_url(&url), |browser| start(browser, &url));
    if let Err(error) = opened {
        tracing::warn!("can't open a browser: {error}; the page is at {url}");
    }
}

#[cfg(windows)]
fn open_url(url: &str) -> io::Result<()> {
    kiln_windows::open_url(url)
}

#[cfg(not(windows))]
fn open_url(url: &str) -> io::Result<()> {
    start(if cfg!(target_os = "macos") { "open" } else { "xdg-open" }.into(), url)
}

/// Starts a program with the address; it goes on by itself.
fn start(program: OsString, url: &str) -> io::Result<()> {
    let mut child = std::process::Command::new(program).arg(url).spawn()?;
    std::thread::spawn(move || child.wait());
    Ok(())
}
