//! Opens the page in the user's browser.

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Opens the page of a server that listens on this address; says so if that fails.
pub fn open(scheme: &str, address: SocketAddr) {
    let url = url(scheme, address);
    let browser = std::env::var_os("BROWSER").filter(|browser| !browser.is_empty());
    let opened = browser.map_or_else(|| open_url(&url), |browser| start(browser, &url));
    if let Err(error) = opened {
        tracing::warn!("can't open a browser: {error}; the page is at {url}");
    }
}

/// The address for a browser on this machine.
fn url(scheme: &str, mut address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        address.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    format!("{scheme}://{address}/")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_on_all_addresses_is_opened_on_this_machine() {
        assert_eq!(url("http", "0.0.0.0:80".parse().unwrap()), "http://127.0.0.1:80/");
        assert_eq!(url("https", "[::]:80".parse().unwrap()), "https://127.0.0.1:80/");
        assert_eq!(url("http", "[::1]:7860".parse().unwrap()), "http://[::1]:7860/");
    }
}
