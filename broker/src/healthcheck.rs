//! The health check of an image that has no other program: asks a broker on this machine whether it takes requests.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    time::Duration,
};

/// How long the broker may take for the answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// Asks the broker that serves its console at `listen`. Returns what is wrong if it does not take requests.
pub(crate) fn ask(listen: SocketAddr) -> Result<(), String> {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let at = SocketAddr::new(ip, listen.port());
    let status = status(at).map_err(|error| format!("no answer from {at}: {error}"))?;
    if status.split(' ').nth(1) == Some("200") {
        return Ok(());
    }
    Err(format!("not ready: {at} answers {:?}", status.trim_end()))
}

/// Returns the first line of the answer to GET /readyz.
fn status(at: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(line)
}
