//! Writes that are gathered, so that what many calls have to say at a time costs one system call and one packet.
//!
//! HTTP/2 flushes its connection whenever one of its calls has written something, often several times for one call. Each flush is a system
//! call, in which the kernel also carries the bytes through all of the receiver's network stack if that is on the same machine: it costs
//! more than all else that is done for a small call. So a flush gives way once, to whatever else is ready to run, and then
//! everything is written that has been added meanwhile. Nothing waits for time to pass.

use std::{
    io::{self, IoSlice},
    pin::{Pin, pin},
    task::{Context, Poll, Waker, ready},
};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is gathered at most.
const MOST: usize = 32 << 10;
/// Writes of so many bytes are worth a system call, and are not copied.
const LARGE: usize = 4 << 10;

/// A connection whose writes are gathered until it is flushed.
#[derive(Debug)]
pub struct Gathered<T: AsyncWrite + Unpin> {
    inner: T,
    gathered: BytesMut,
    /// True while a flush is under way that has given way.
    has_given_way: bool,
}

impl<T: AsyncWrite + Unpin> Gathered<T> {
    /// Gathers what is written to a connection.
    pub fn new(inner: T) -> Self {
        Self { inner, gathered: BytesMut::new(), has_given_way: false }
    }

    fn poll_write_gathered(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            match ready!(Pin::new(&mut self.inner).poll_write(context, &self.gathered))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.gathered.advance(written),
            }
        }
        self.gathered.clear();
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Gathered<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length < LARGE && self.gathered.len() + length <= MOST {
            for part in parts {
                self.gathered.extend_from_slice(part);
            }
            return Poll::Ready(Ok(length));
        }
        loop {
            let this = &mut *self;
            let all = std::iter::once(IoSlice::new(&this.gathered)).chain(parts.iter().copied());
            let all: Vec<_> = all.collect();
            let written = ready!(Pin::new(&mut this.inner).poll_write_vectored(context, &all))?;
            let of_gathered = written.min(this.gathered.len());
            this.gathered.advance(of_gathered);
            if written > of_gathered {
                return Poll::Ready(Ok(written - of_gathered));
            }
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.gathered.is_empty() && !self.has_given_way {
            self.has_given_way = true;
            // Woken when all that is ready has run.
            return pin!(tokio::task::yield_now()).poll(context).map(Ok);
        }
        ready!(self.poll_write_gathered(context))?;
        self.has_given_way = false;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_gathered(context))?;
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

impl<T: AsyncWrite + Unpin> Drop for Gathered<T> {
    /// Writes what was not flushed, as far as that is possible at once: the alert that ends a TLS handshake, for one, is not flushed.
    fn drop(&mut self) {
        let _ = self.poll_write_gathered(&mut Context::from_waker(Waker::noop()));
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Gathered<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A connection that takes at most so many bytes at a time, and not always at once.
    struct Slow {
        writes: Vec<Vec<u8>>,
        most: usize,
        is_busy: bool,
    }

    impl AsyncWrite for Slow {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.is_busy = !self.is_busy;
            if self.is_busy {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let taken = bytes.len().min(self.most);
            self.writes.push(bytes[..taken].to_vec());
            Poll::Ready(Ok(taken))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    fn gathered(most: usize) -> Gathered<Slow> {
        Gathered::new(Slow { writes: Vec::new(), most, is_busy: false })
    }

    #[tokio::test]
    async fn what_is_added_while_a_flush_gives_way_is_written_with_the_rest() {
        let mut connection = gathered(usize::MAX);
        connection.write_all(b"one").await.unwrap();
        let mut flushes = 0;
        let mut flush = pin!(poll_fn(|context| {
            flushes += 1;
            let flushed = Pin::new(&mut connection).poll_flush(context);
            if flushes == 1 {
                assert!(flushed.is_pending(), "it gives way");
                assert!(Pin::new(&mut connection).poll_write(context, b", two").is_ready());
            }
            flushed
        }));
        (&mut flush).await.unwrap();
        connection.write_all(b"three").await.unwrap();
        connection.flush().await.unwrap();
        connection.flush().await.unwrap();
        assert_eq!(connection.inner.writes, [&b"one, two"[..], b"three"]);
    }

    #[tokio::test]
    async fn what_was_not_flushed_is_written_at_the_end() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut connection = Gathered::new(ours);
        // All parts are taken at once, as TLS relies on for its last words.
        let parts = [IoSlice::new(b"the "), IoSlice::new(b"end")];
        assert_eq!(connection.write_vectored(&parts).await.unwrap(), 7);
        drop(connection);
        let mut read = Vec::new();
        theirs.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, b"the end");
    }

    #[tokio::test]
    async fn everything_is_written_in_order_whatever_the_lengths() {
        for most in [1_000, 7_000, usize::MAX] {
            let mut connection = gathered(most);
            let mut all = Vec::new();
            for (number, length) in
                [1, 10, 40_000, 3, 4_096, 1, 0, 4_095, 4_000, 20_000, 3_000, 4_000, 4_000, 4_000]
                    .into_iter()
                    .enumerate()
            {
                let bytes = vec![number as u8; length];
                connection.write_all(&bytes).await.unwrap();
                all.extend(bytes);
                if number % 4 == 1 {
                    connection.flush().await.unwrap();
                    assert!(connection.inner.writes.concat() == all);
                }
            }
            connection.shutdown().await.unwrap();
            assert!(connection.inner.writes.concat() == all, "the end is written too");
        }
    }
}
