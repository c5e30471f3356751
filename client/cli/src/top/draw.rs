//! The screen: the list of queues, the help, and the lines above and below.

use std::time::Instant;

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Row as TableRow, Table, TableState},
};

use super::{
    app::{App, Mode},
    board::{Mark, Row, Sort},
    draw_queue,
    style::{Styles, count, rate},
};
use crate::{output::harmless, values};

/// A column of the list.
struct Column {
    title: &'static str,
    sort: Option<Sort>,
    width: u16,
    /// The narrowest screen that has it.
    from: u16,
}

const COLUMNS: [Column; 10] = [
    column("QUEUE", Some(Sort::Name), 0, 0),
    column("READY", Some(Sort::Ready), 10, 0),
    column("DELAYED", Some(Sort::Delayed), 10, 90),
    column("RESERVED", Some(Sort::Reserved), 10, 70),
    column("BLOCKED", Some(Sort::Blocked), 10, 100),
    column("OLDEST", Some(Sort::Oldest), 9, 0),
    column("IN/S", Some(Sort::In), 9, 55),
    column("OUT/S", Some(Sort::Out), 9, 55),
    column("CONSUMERS", Some(Sort::Consumers), 11, 80),
    column("", None, 12, 60),
];

const fn column(title: &'static str, sort: Option<Sort>, width: u16, from: u16) -> Column {
    Column { title, sort, width, from }
}

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, app: &mut App, now: Instant) {
    let [above, middle, below] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(first_line(app, now), above);
    match app.mode {
        Mode::Queue => draw_queue::draw(frame, app, middle, now),
        Mode::List | Mode::Filter | Mode::Help => draw_list(frame, app, middle, now),
    }
    frame.render_widget(last_line(app), below);
    if app.mode == Mode::Help {
        draw_help(frame, middle);
    }
}

fn first_line(app: &App, now: Instant) -> Line<'static> {
    let styles = Styles::of(app);
    let mut spans = vec![Span::styled("sluice top", Styles::head())];
    spans.push(Span::raw(format!("  {}", harmless(&app.server, false))));
    if let Some(problem) = &app.problem {
        // The figures of before stay on the screen.
        let text = format!("  no new figures: {}", harmless(problem, false));
        spans.push(Span::styled(text, styles.bad()));
        return Line::from(spans);
    }
    if !app.is_loaded {
        spans.push(Span::raw("  waiting for figures"));
        return Line::from(spans);
    }
    let queues = match app.board.len() {
        1 => "1 queue".to_owned(),
        n => format!("{n} queues"),
    };
    spans.push(Span::raw(format!("  {queues}")));
    if !app.filter.is_empty() {
        spans.push(Span::raw(format!(", {} shown", app.shown(now).len())));
    }
    Line::from(spans)
}

fn last_line(app: &App) -> Line<'static> {
    let styles = Styles::of(app);
    match app.mode {
        Mode::Filter => Line::from(vec![
            Span::styled("name contains: ", Styles::head()),
            Span::raw(harmless(&app.filter, false)),
            Span::styled("▏  Enter keeps, Esc clears", styles.quiet()),
        ]),
        Mode::Queue => Line::styled("Esc back   q quit", styles.quiet()),
        Mode::Help => Line::styled("any key goes back", styles.quiet()),
        Mode::List => {
            let filter = if app.filter.is_empty() {
                String::new()
            } else {
                format!("   name contains: {} (Esc clears)", harmless(&app.filter, false))
            };
            let keys = "Enter open   / filter   n r d v b a i o c sort   ? help   q quit";
            Line::styled(format!("{keys}{filter}"), styles.quiet())
        }
    }
}

fn draw_list(frame: &mut Frame<'_>, app: &mut App, area: Rect, now: Instant) {
    app.page = usize::from(area.height.saturating_sub(1)).max(1);
    let styles = Styles::of(app);
    let columns: Vec<usize> =
        (0..COLUMNS.len()).filter(|&at| area.width >= COLUMNS[at].from).collect();
    let head = columns.iter().map(|&at| title(&COLUMNS[at], app.sort, app.reverse));
    let shown = app.shown(now);
    let place = app.place(now);
    // Only what is on the screen is made into text: there may be 10,000 queues.
    let first = first_row(app.first, place.unwrap_or(0), app.page, shown.len());
    let rows = shown.iter().skip(first).take(app.page).map(|row| {
        let cells = cells(row, now);
        let style = row.mark(now).map_or(Style::new(), |mark| styles.mark(mark));
        TableRow::new(columns.iter().map(|&at| cells[at].clone()).collect::<Vec<_>>()).style(style)
    });
    let widths = columns.iter().map(|&at| match COLUMNS[at].width {
        0 => Constraint::Min(12),
        width => Constraint::Length(width),
    });
    let table = Table::new(rows, widths)
        .header(TableRow::new(head).style(Styles::head()))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut selection = TableState::new().with_selected(place.map(|place| place - first));
    frame.render_stateful_widget(table, area, &mut selection);
    app.first = first;
    if app.is_loaded && app.board.len() == 0 {
        let note = "There are no queues yet: the first push creates one.";
        frame.render_widget(Paragraph::new(note), below_head(area));
    }
}

fn below_head(area: Rect) -> Rect {
    Rect { y: area.y + 2, height: area.height.saturating_sub(2), ..area }
}

/// Returns the first row on the screen: as before, unless the selected one would be outside.
fn first_row(before: usize, selected: usize, page: usize, rows: usize) -> usize {
    let at_least = (selected + 1).saturating_sub(page);
    before.clamp(at_least, selected.max(at_least)).min(rows.saturating_sub(page).max(at_least))
}

fn title(column: &Column, sort: Sort, reverse: bool) -> Line<'static> {
    let is_sorted = column.sort == Some(sort);
    let arrow = if !is_sorted {
        ""
    } else if sort.is_descending() == reverse {
        "▲"
    } else {
        "▼"
    };
    let text = format!("{}{arrow}", column.title);
    if column.sort == Some(Sort::Name) || column.sort.is_none() {
        Line::from(text)
    } else {
        Line::from(text).right_aligned()
    }
}

fn cells(row: &Row, now: Instant) -> [Line<'static>; 10] {
    let stats = &row.stats;
    let right = |text: String| Line::from(text).right_aligned();
    let (come, gone) = row.rates();
    let mark = match row.mark(now) {
        Some(Mark::Paused) => "paused",
        Some(Mark::Stuck) => "stuck",
        Some(Mark::DeadLetters) => "dead letters",
        None => "",
    };
    [
        Line::from(harmless(&stats.queue, false)),
        right(count(stats.ready)),
        right(count(stats.delayed)),
        right(count(stats.reserved)),
        right(count(stats.blocked)),
        right(row.oldest(now).map(values::about).unwrap_or_default()),
        right(rate(come)),
        right(rate(gone)),
        right(count(stats.consumers_of_all_brokers.into())),
        Line::from(mark),
    ]
}

const HELP: [&str; 16] = [
    "↑ ↓ j k      select a queue",
    "PgUp PgDn    a page up or down",
    "g G          the first and the last queue",
    "Enter →      open the queue: settings, consumers, dead letters",
    "Esc ←        back; in the list: clear the filter",
    "/            show only names that contain a text",
    "n            sort by name",
    "r d v b      sort by ready, delayed, reserved, blocked items",
    "a            sort by the age of the oldest ready item",
    "i o          sort by items per second, in and out",
    "c            sort by consumers",
    "             the same key again reverses the order",
    "q Ctrl-C     quit",
    "",
    "stuck: items have been ready for a minute, and nobody takes them",
    "out: committed, moved, dead-lettered, expired and discarded items",
];

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let width = 72.min(area.width);
    let height = (HELP.len() as u16 + 2).min(area.height);
    let [area] = Layout::horizontal([Constraint::Length(width)])
        .flex(ratatui::layout::Flex::Center)
        .areas(area);
    let [area] = Layout::vertical([Constraint::Length(height)])
        .flex(ratatui::layout::Flex::Center)
        .areas(area);
    frame.render_widget(Clear, area);
    let lines: Vec<Line<'_>> = HELP.iter().copied().map(Line::from).collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("Keys")), area);
}

#[cfg(test)]
mod tests {
    use ratatui::{buffer::Buffer, style::Color};
    use sluicegate_client::proto::{Queue, QueueStats};

    use super::*;
    use crate::top::{feed::News, style::tests::screen};

    fn drawn(app: &mut App, now: Instant, width: u16, height: u16) -> (Vec<String>, Buffer) {
        screen(width, height, |frame| draw(frame, app, now))
    }

    fn app(now: Instant) -> App {
        let mut app = App::new("http://b:7400".to_owned(), true);
        let age = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        let orders = QueueStats {
            queue: "orders".to_owned(),
            ready: 12_345,
            delayed: 7,
            reserved: 32,
            oldest_ready_age: age(62),
            consumers_of_all_brokers: 2,
            ..QueueStats::default()
        };
        let hostile = QueueStats { queue: "a\u{1b}[31mb".to_owned(), ..QueueStats::default() };
        let stuck = QueueStats {
            queue: "mail".to_owned(),
            ready: 3,
            oldest_ready_age: age(7_200),
            ..QueueStats::default()
        };
        app.hear(News::Stats(vec![orders.clone(), hostile, stuck]), now);
        app.board.sample(now);
        let later = now + std::time::Duration::from_secs(2);
        app.hear(News::Stats(vec![QueueStats { pushed: 50, committed: 3, ..orders }]), later);
        app.board.sample(later);
        app
    }

    #[test]
    fn the_list_shows_figures_rates_and_what_stands_out() {
        let start = Instant::now();
        let mut app = app(start);
        let now = start + std::time::Duration::from_secs(2);
        let (lines, buffer) = drawn(&mut app, now, 120, 6);
        assert_eq!(lines[0], "sluice top  http://b:7400  3 queues");
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let head = [
            "QUEUE",
            "READY▼",
            "DELAYED",
            "RESERVED",
            "BLOCKED",
            "OLDEST",
            "IN/S",
            "OUT/S",
            "CONSUMERS",
        ];
        assert_eq!(words(&lines[1]), head);
        let orders = ["orders", "12,345", "7", "32", "0", "1m", "2s", "25", "1.5", "2"];
        assert_eq!(words(&lines[2]), orders);
        assert_eq!(words(&lines[3]), ["mail", "3", "0", "0", "0", "2h", "0", "stuck"]);
        assert!(lines[4].starts_with("a\\u{1b}[31mb"), "{}", lines[4]);
        assert!(lines[5].contains("q quit"), "{}", lines[5]);
        assert_eq!(buffer[(0, 3)].fg, Color::Red, "stuck");
        app.has_colours = false;
        let (_, buffer) = drawn(&mut app, now, 120, 6);
        assert!(buffer.content.iter().all(|cell| cell.fg == Color::Reset), "NO_COLOR");
    }

    #[test]
    fn the_selected_queue_is_reversed_and_stays_on_the_screen() {
        let now = Instant::now();
        let mut app = App::new("b".to_owned(), false);
        let queue = |at: usize| Queue { name: format!("q{at:05}"), ..Queue::default() };
        app.hear(News::Queues((0..10_000).map(queue).collect()), now);
        app.sort = Sort::Name;
        for (selected, first) in [(0, 0), (9_999, 9_990), (9_991, 9_990), (5_000, 5_000)] {
            app.selected = Some(format!("q{selected:05}"));
            let (lines, buffer) = drawn(&mut app, now, 80, 13);
            assert!(lines[2].starts_with(&format!("q{first:05}")), "{selected}: {}", lines[2]);
            let at = (0..13).find(|y| buffer[(0, *y)].modifier.contains(Modifier::REVERSED));
            let at = at.expect("a row is selected");
            assert!(lines[usize::from(at)].starts_with(&format!("q{selected:05}")), "{lines:?}");
        }
    }

    #[test]
    fn narrow_screens_leave_columns_out_and_none_is_too_small() {
        let now = Instant::now();
        let mut app = app(now);
        let (lines, _) = drawn(&mut app, now, 50, 5);
        let head: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(head, ["QUEUE", "READY▼", "OLDEST"]);
        for mode in [Mode::List, Mode::Filter, Mode::Queue, Mode::Help] {
            for (width, height) in [(1, 1), (3, 2), (20, 4)] {
                app.mode = mode;
                app.open = Some("orders".to_owned());
                drawn(&mut app, now, width, height);
            }
        }
    }

    #[test]
    fn a_problem_is_shown_beside_the_figures_of_before() {
        let now = Instant::now();
        let mut app = app(now);
        app.hear(News::Problem("the broker \u{1b}[2J is away".to_owned()), now);
        let (lines, _) = drawn(&mut app, now, 100, 6);
        assert!(lines[0].contains("no new figures: the broker \\u{1b}[2J is away"), "{}", lines[0]);
        assert!(lines[2].starts_with("orders"), "{}", lines[2]);
        app.hear(News::Stats(vec![]), now);
        assert!(drawn(&mut app, now, 100, 6).0[0].contains("3 queues"), "it has passed");
    }

    #[test]
    fn counts_are_grouped_and_rates_rounded() {
        let counts = [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")];
        for (n, shown) in counts.into_iter().chain([(12_345_678, "12.3M")]) {
            assert_eq!(count(n), shown);
        }
        assert_eq!(
            (rate(0.0), rate(0.25), rate(1_500.4)),
            (String::new(), "0.2".to_owned(), "1,500".to_owned())
        );
    }
}
