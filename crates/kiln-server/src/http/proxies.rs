//! Proxies in front of the server: whose `X-Forwarded-*` headers count.

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::HeaderMap;

/// An address, or a network as in `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Network, String> {
        let invalid = || "expected an address such as 10.0.0.1, or a network such as 10.0.0.0/8".to_owned();
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix.parse::<u8>().map_err(|_| invalid())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.unwrap_or(bits);
        if prefix > bits {
            return Err(format!("the prefix of {address} has at most {bits} bits, found {prefix}"));
        }
        Ok(Network { address, prefix })
    }
}

impl Network {
    /// Whether the network holds this address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let shared = |a: u128, b: u128, bits: u32| {
            let prefix = u32::from(self.prefix);
            prefix == 0 || (a ^ b) >> (bits - prefix) == 0
        };
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => shared(a.to_bits().into(), b.to_bits().into(), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => shared(a.to_bits(), b.to_bits(), 128),
            _ => false,
        }
    }
}

/// Where a request comes from, as the client's own connection shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The client's address.
    pub(crate) address: IpAddr,
    /// Whether the client's connection is encrypted.
    pub(crate) secure: bool,
    /// The host in the client's request, if a proxy reports it.
    pub(crate) host: Option<String>,
}

impl Origin {
    /// The origin of a request from `peer`. The headers count only if the peer is one of the `proxies`; then the client is
    /// the last address that is not a proxy.
    pub(crate) fn new(peer: IpAddr, encrypted: bool, headers: &HeaderMap, proxies: &[Network]) -> Origin {
        let is_proxy = |address: IpAddr| proxies.iter().any(|proxy| proxy.contains(address));
        let peer = peer.to_canonical();
        if !is_proxy(peer) {
            return Origin { address: peer, secure: encrypted, host: None };
        }
        let forwarded = headers.get_all("x-forwarded-for").iter().filter_map(|value| value.to_str().ok());
        let forwarded: Vec<&str> = forwarded.flat_map(|value| value.split(',')).collect();
        let mut address = peer;
        for text in forwarded.into_iter().rev() {
            // What comes before a text that is not an address can't be trusted either.
            let Some(next) = parse_address(text.trim()) else { break };
            address = next;
            if !is_proxy(next) {
                break;
            }
        }
        let last = |name: &str| {
            let value = headers.get_all(name).iter().next_back()?.to_str().ok()?;
            Some(value.rsplit(',').next().unwrap_or(value).trim().to_owned())
        };
        let secure = last("x-forwarded-proto").is_some_and(|proto| proto.eq_ignore_ascii_case("https"));
        let host = last("x-forwarded-host").filter(|host| !host.is_empty());
        Origin { address, secure: secure || encrypted, host }
    }
}

/// Parses an address, with or without a port.
fn parse_address(text: &str) -> Option<IpAddr> {
    let address = text.parse().or_else(|_| text.parse::<std::net::SocketAddr>().map(|socket| socket.ip()));
    let address = address.or_else(|_| text.trim_start_matches('[').trim_end_matches(']').parse());
    address.ok().map(|address: IpAddr| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn networks_hold_their_addresses() {
        let holds = |network: &str, address: &str| network.parse::<Network>().unwrap().contains(ip(address));
        assert!(holds("10.0.0.0/8", "10.200.3.4") && !holds("10.0.0.0/8", "11.0.0.1"));
        assert!(holds("192.168.1.7", "192.168.1.7") && !holds("192.168.1.7", "192.168.1.8"));
        assert!(holds("10.0.0.1", "::ffff:10.0.0.1") && holds("0.0.0.0/0", "1.2.3.4"));
        assert!(
            holds("fd00::/8", "fd12::1") && !holds("fd00::/8", "2001:db8::1") && !holds("::/0", "1.2.3.4")
        );
        for wrong in ["10.0.0.0/33", "::/129", "10.0.0.0/x", "proxy.example", "", "10.0.0.0/"] {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn forwarded_headers_count_from_proxies_alone() {
        let proxies = ["10.0.0.1".parse().unwrap(), "10.0.1.0/24".parse().unwrap()];
        let origin = |peer: &str, forwarded: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-forwarded-for", forwarded.parse().unwrap());
            headers.insert("x-forwarded-proto", "https".parse().unwrap());
            headers.insert("x-forwarded-host", "kiln.example".parse().unwrap());
            Origin::new(ip(peer), false, &headers, &proxies)
        };
        let stranger = origin("203.0.113.5", "127.0.0.1");
        assert_eq!(stranger, Origin { address: ip("203.0.113.5"), secure: false, host: None });
        let client = origin("10.0.0.1", "1.1.1.1, 203.0.113.5, 10.0.1.9");
        let host = Some("kiln.example".to_owned());
        assert_eq!(client, Origin { address: ip("203.0.113.5"), secure: true, host });
        // The client made up the first address; the proxy added the last.
        assert_eq!(origin("10.0.0.1", "127.0.0.1, 203.0.113.5").address, ip("203.0.113.5"));
        assert_eq!(origin("10.0.0.1", "127.0.0.1, nonsense").address, ip("10.0.0.1"));
        assert_eq!(origin("10.0.0.1", "203.0.113.5:4711").address, ip("203.0.113.5"));
        assert_eq!(origin("10.0.0.1", "[2001:db8::1]").address, ip("2001:db8::1"));
    }
}
