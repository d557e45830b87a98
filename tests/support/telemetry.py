"""OpenTelemetry's own SDK, set up once, because a process can set it only once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class SdkError(Exception):
    """The error of a broken SDK."""


class _Fault(SpanProcessor, AlwaysOffExemplarFilter):
    """Makes the SDK fail at the beginning and end of a span, and at a measurement."""

    def __init__(self) -> None:
        self.is_on = False
        self.raised = 0

    def _check(self) -> None:
        if self.is_on:
            self.raised += 1
            raise SdkError

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._check()

    def on_end(self, span: ReadableSpan) -> None:
        self._check()

    def should_sample(self, *_arguments: Any) -> bool:
        self._check()
        return False


class Telemetry:
    """The measurements and spans of the SDK since the last call of ``forget``.

    :ivar fault: makes the SDK fail
    """

    def __init__(self) -> None:
        self.fault = _Fault()
        self._before: list[tuple[str, Any]] = []
        self._reader = InMemoryMetricReader()
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        tracers.add_span_processor(self.fault)
        trace.set_tracer_provider(tracers)
        metrics.set_meter_provider(
            MeterProvider(
                [self._reader, PrometheusMetricReader()],
                exemplar_filter=self.fault,
                shutdown_on_exit=False,
            )
        )

    def forget(self) -> None:
        """Forget all measurements and spans, because other tests have tasks of the same names."""
        self._spans.clear()
        self._before = [
            (metric.name, _measured(point))
            for _, metric in self._metrics()
            for point in metric.data.data_points
        ]

    def points(self, instrument: str, task: str) -> list[Any]:
        """Return an instrument's data points of a task that were measured since ``forget``."""
        return [
            point
            for _, metric in self._metrics()
            if metric.name == instrument
            for point in metric.data.data_points
            if point.attributes["tasklock.task.name"] == task
            and (instrument, _measured(point)) not in self._before
        ]

    def attributes(self, instrument: str, task: str) -> list[dict[str, Any]]:
        """Return the attributes of the points, without the task's name."""
        return [without_task(point.attributes) for point in self.points(instrument, task)]

    def attribute_names(self) -> set[str]:
        """Return the names of all attributes of measurements."""
        return {
            name
            for _, metric in self._metrics()
            for point in metric.data.data_points
            for name in point.attributes
        }

    def units(self) -> dict[str, str]:
        """Return the units of all instruments of the library."""
        found = self._metrics()
        return {m.name: m.unit for scope, m in found if scope.name == "apscheduler_tasklock"}

    def _metrics(self) -> list[tuple[Any, Any]]:
        data = self._reader.get_metrics_data()
        return [
            (scope.scope, metric)
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]

    def spans(self, name: str) -> list[ReadableSpan]:
        """Return the finished spans of a name."""
        return [span for span in self._spans.get_finished_spans() if span.name == name]


def _measured(point: Any) -> tuple[dict[str, Any], Any]:
    """Return the attributes of a data point, and its sum or count."""
    value = point.count if hasattr(point, "count") else point.value
    return dict(point.attributes), value


def without_task(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key != "tasklock.task.name"}


@cache
def telemetry() -> Telemetry:
    """Return the SDK of this process."""
    return Telemetry()
