"""Changes that MLflow's API does not offer, made in its database: only for a database store, not for a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

if TYPE_CHECKING:
    from mlflow import MlflowClient


def _engine(client: MlflowClient) -> Any:
    """SQLAlchemy's engine of the store; ``None`` for a server."""
    return getattr(client._tracking_client.store, "engine", None)


def forget_steps_behind(client: MlflowClient, run_id: str, step: int) -> bool:
    """Delete the metrics of steps after ``step``, which a run resumed from there writes again.

    MLflow keeps every value that was ever logged for a step, and its charts draw them all. A server cannot delete
    metrics; there MLflow shows the value written last as the latest.

    Returns:
        Whether the store is a database, so that they were deleted.
    """
    engine = _engine(client)
    if engine is None:
        return False
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
    from sqlalchemy import delete, insert, select

    metric: Any = SqlMetric  # its columns are declared in a way that type checkers cannot see
    latest: Any = SqlLatestMetric
    with engine.begin() as connection:
        connection.execute(delete(metric).where(metric.run_uuid == run_id, metric.step > step))
        late = select(latest.key).where(latest.run_uuid == run_id, latest.step > step)
        for key in connection.scalars(late).all():
            connection.execute(delete(latest).where(latest.run_uuid == run_id, latest.key == key))
            columns = [metric.key, metric.value, metric.timestamp, metric.step, metric.is_nan]
            newest = (metric.step.desc(), metric.timestamp.desc(), metric.value.desc())
            rows = select(*columns).where(metric.run_uuid == run_id, metric.key == key).order_by(*newest)
            row = connection.execute(rows).first()
            if row is not None:
                connection.execute(insert(latest).values(run_uuid=run_id, **row._mapping))
    return True


def artifacts_beside(client: MlflowClient, database: Path) -> bool:
    """Correct the absolute artifact paths in the database of a local store whose folder was moved.

    Returns:
        Whether any path was changed.
    """
    from mlflow.store.tracking.dbmodels.models import SqlExperiment, SqlRun
    from sqlalchemy import select, update

    engine, now = _engine(client), database.parent / "artifacts"
    if engine is None:
        return False
    run: Any = SqlRun
    with engine.begin() as connection:
        places = connection.scalars(select(SqlExperiment.artifact_location).distinct()).all()
        former = [place for place in places if place and _is_former(place, now)]
        for location in former:
            experiments = update(SqlExperiment).where(SqlExperiment.artifact_location == location)
            connection.execute(experiments.values(artifact_location=now.as_uri()))
            runs = select(run.run_uuid, run.artifact_uri).where(run.artifact_uri.startswith(f"{location}/"))
            for run_id, uri in connection.execute(runs).all():
                moved = now.as_uri() + uri.removeprefix(location)
                connection.execute(update(run).where(run.run_uuid == run_id).values(artifact_uri=moved))
    return bool(former)


def _is_former(uri: str, now: Path) -> bool:
    """Whether this is the artifact folder beside this database before it was moved."""
    parsed = urlparse(uri)
    path = Path(unquote(parsed.path))
    return parsed.scheme == "file" and path != now and path.parts[-2:] == now.parts[-2:]
