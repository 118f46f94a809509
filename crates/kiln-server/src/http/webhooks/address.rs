//! The addresses that webhooks may call. Clients choose them, so the server must not be led into its own network: names
//! are resolved here, and a call goes to the very address that was checked.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Error};

/// Checks an address as far as that goes without resolving its name.
pub(super) fn check(url: &str, allow_private: bool) -> Result<(), String> {
    let uri: Uri = url.parse().map_err(|_| "expected a URL".to_owned())?;
    let host = uri.host().filter(|host| !host.is_empty()).ok_or("expected a URL with a host")?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err("expected http:// or https://".into());
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err("a URL with a user name is not accepted".into());
    }
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let local = literal.is_ok_and(|ip| !is_public(ip)) || host.eq_ignore_ascii_case("localhost");
    if local && !allow_private {
        return Err(refused(host));
    }
    Ok(())
}

fn refused(host: &str) -> String {
    format!("`{host}` is inside the server's own network; --webhook-private allows that")
}

/// A client that calls public addresses only, unless `allow_private`, and follows no redirects.
pub(super) fn agent(allow_private: bool, timeout: Duration) -> Agent {
    let config = Agent::config_builder()
        .timeout_global(Some(timeout))
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        // A proxy would resolve the name itself.
        .proxy(None)
        .build();
    Agent::with_parts(config, DefaultConnector::new(), CheckedResolver { allow_private })
}

/// Resolves names, and refuses those with a private address.
#[derive(Debug)]
struct CheckedResolver {
    allow_private: bool,
}

impl Resolver for CheckedResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let addresses = DefaultResolver::default().resolve(uri, config, timeout)?;
        if !self.allow_private && addresses.iter().any(|address| !is_public(address.ip())) {
            let message = refused(uri.host().unwrap_or_default());
            return Err(Error::Io(std::io::Error::new(std::io::ErrorKind::PermissionDenied, message)));
        }
        Ok(addresses)
    }
}

/// Whether an address is on the public internet.
fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => is_public_v6(ip),
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    let shared = a == 100 && (64..128).contains(&b);
    let special = a == 0 || a >= 224 || (a, b, c) == (192, 0, 0) || (a == 198 && (b == 18 || b == 19));
    !(ip.is_private() || ip.is_loopback() || ip.is_link_local() || ip.is_documentation() || shared || special)
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    if let Some(v4) = ip.to_ipv4_mapped() {
        return is_public_v4(v4);
    }
    // Global unicast is 2000::/3. In it, Teredo, documentation and 6to4 lead elsewhere.
    let [first, second, ..] = ip.segments();
    let elsewhere = first == 0x2002 || (first == 0x2001 && (second == 0 || second == 0xdb8));
    first & 0xe000 == 0x2000 && !elsewhere
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_recognized() {
        let public = |text: &str| is_public(text.parse().unwrap());
        for inside in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "198.18.0.1",
            "::1",
            "::",
            "fe80::1",
            "fd00::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:db8::1",
            "::7f00:1",
        ] {
            assert!(!public(inside), "{inside}");
        }
        for outside in ["1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "::ffff:1.1.1.1"] {
            assert!(public(outside), "{outside}");
        }
    }

    #[test]
    fn urls_are_checked_when_a_job_is_submitted() {
        for wrong in [
            "",
            "hook",
            "ftp://example.org/",
            "https://",
            "file:///etc/passwd",
            "https://me@example.org/",
            "http://127.0.0.1/",
            "http://[::1]:80/",
            "http://localhost/x",
            "http://169.254.169.254/latest",
        ] {
            assert!(check(wrong, false).is_err(), "{wrong}");
        }
        assert_eq!(check("https://example.org/hook?a=b", false), Ok(()));
        assert_eq!(check("http://127.0.0.1:8000/hook", true), Ok(()));
    }

    #[test]
    fn a_name_that_resolves_to_this_machine_is_not_called() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://localhost:{}/", listener.local_addr().unwrap().port());
        let error = agent(false, Duration::from_secs(2)).post(&url).send("x").unwrap_err();
        assert!(error.to_string().contains("own network"), "{error}");
        assert!(listener.accept().is_err(), "nothing was connected");
    }
}
