//! Where the server listens, and the server that may be there already: for `--open`, which a double click on Windows has.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::args::{DEFAULT_PORT, ServeArgs};
use crate::error::CliError;

/// Ports that are tried from the default one on, which other programs for images have, too.
const PORTS: u16 = 10;
/// How long a server on this machine may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The page is recognized by its beginning.
const TITLE: &str = "<title>Kiln</title>";
const HEAD: u64 = 8192;

/// The addresses to try. Nobody types that of a page that opens by itself, so its default port may be another.
fn addresses(args: &ServeArgs) -> impl Iterator<Item = SocketAddr> {
    let more = if args.open && args.port == DEFAULT_PORT { PORTS } else { 1 };
    let (host, first) = (args.host, args.port);
    (0..more).map(move |i| SocketAddr::new(host, first.saturating_add(i)))
}

/// Listens on the first free address. The text says why that is not the first one.
pub async fn listen(args: &ServeArgs) -> Result<(TcpListener, Option<String>), CliError> {
    let mut failed: Option<(SocketAddr, io::Error)> = None;
    for address in addresses(args) {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                let warning =
                    |(wanted, error)| format!("can't listen on {wanted}: {error}; listening on {address}");
                return Ok((listener, failed.map(warning)));
            }
            Err(error) => failed = failed.or(Some((address, error))),
        }
    }
    let (address, error) =
        failed.unwrap_or_else(|| (SocketAddr::new(args.host, args.port), io::ErrorKind::Other.into()));
    Err(CliError::new(format!("can't listen on {address}: {error}")).hint("choose another port with --port"))
}

/// The address of a Kiln that runs already, for programs on this machine.
pub async fn running(args: &ServeArgs) -> Option<SocketAddr> {
    // At once: Windows takes two seconds to find out that nobody listens.
    let ask = |address| (address, tokio::spawn(timeout(PATIENCE, is_kiln(address))));
    let asked: Vec<_> = addresses(args).map(on_this_machine).map(ask).collect();
    for (address, answer) in asked {
        if matches!(answer.await, Ok(Ok(Ok(true)))) {
            return Some(address);
        }
    }
    None
}

/// The address that leads to a server on all addresses.
pub fn on_this_machine(mut address: SocketAddr) -> SocketAddr {
    // Not the same for both: on Windows, IPv6 alone is served by a server on all of its addresses.
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

async fn is_kiln(address: SocketAddr) -> io::Result<bool> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    stream.take(HEAD).read_to_end(&mut head).await?;
    Ok(String::from_utf8_lossy(&head).contains(TITLE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_on_all_addresses_is_found_on_this_machine() {
        for (all, one) in
            [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("10.0.0.1:7860", "10.0.0.1:7860")]
        {
            assert_eq!(on_this_machine(all.parse().unwrap()), one.parse().unwrap());
        }
    }
}
